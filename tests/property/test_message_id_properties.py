"""Messages share an id only if everything that their encoding depends on is the same."""

from hypothesis import example, given
from hypothesis import strategies as st

from choreo_agents.kv.handle import message_id

P, Q = "0" * 32, "f" * 32
ingredients = st.tuples(
    st.binary(max_size=3),
    st.text(";:,12", max_size=4),
    st.lists(st.integers(0, 30), max_size=3).map(tuple),
    st.lists(st.sampled_from([P, Q]), max_size=2).map(tuple),
    st.lists(st.integers(-12, 12), max_size=2).map(tuple),
)


@given(ingredients, ingredients)
@example((b"", "m", (1, 23), (), ()), (b"", "m", (12, 3), (), ()))
@example((b"", "m", (1,), (), ()), (b"", "m;1:1", (), (), ()))
@example((b"", "m", (1,), (), ()), (b"", "m1", (), (), ()))
@example((b"", "m", (1,), (P, Q), (0, 1)), (b"", "m", (1,), (Q, P), (0, 1)))
@example((b"", "m", (1,), (P,), (2,)), (b"", "m", (1,), (), (2,)))
@example((b"s", "m", (1,), (P,), (2,)), (b"s", "m", (1,), (P,), (2,)))
def test_only_equal_ingredients_share_an_id(one: tuple, two: tuple) -> None:
    # HMAC pads its key with zero bytes, so salts are compared without trailing ones.
    equal = (one[0].rstrip(b"\0"), *one[1:]) == (two[0].rstrip(b"\0"), *two[1:])
    assert (message_id(*one) == message_id(*two)) == equal
