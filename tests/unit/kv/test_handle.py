"""What a message's id depends on, and how a handle travels."""

import json

import pytest
from pydantic import ValidationError

from choreo_agents.engine.messages.message import place
from choreo_agents.kv.handle import MessageHandle, message_id

P, Q = "0" * 32, "f" * 32
SAME = {"salt": b"s", "model": "m", "tokens": (1, 2, 3), "parents": (P, Q), "relative_offsets": (-9, -4)}


def test_the_same_ingredients_give_the_same_id() -> None:
    assert message_id(**SAME) == message_id(**SAME)
    assert len(message_id(**SAME)) == 32


@pytest.mark.parametrize(
    "other",
    [
        {"salt": b"t"},
        {"salt": b""},
        {"model": "n"},
        {"tokens": (1, 2)},
        {"tokens": (1, 3, 2)},
        {"tokens": (12, 3)},
        {"parents": (P,), "relative_offsets": (-9,)},
        {"parents": (Q, P)},
        {"parents": (P, P)},
        {"relative_offsets": (-4, -9)},
        {"relative_offsets": (-9, -5)},
        {"relative_offsets": (9, -4)},
    ],
    ids=str,
)
def test_the_id_depends_on_each_ingredient(other: dict) -> None:
    assert message_id(**(SAME | other)) != message_id(**SAME)


def test_moving_the_whole_view_keeps_the_id_and_moving_one_parent_changes_it() -> None:
    def placed(offsets: list[int], new_offset: int) -> str:
        return message_id(**(SAME | {"relative_offsets": place([5, 4], offsets, new_offset).relative()}))

    assert placed([0, 5], 9) == placed([100, 105], 109)
    assert placed([0, 5], 9) != placed([0, 6], 9)
    assert placed([0, 5], 9) != placed([0, 5], 10)


def test_a_handle_round_trips_through_json() -> None:
    handle = MessageHandle(id=message_id(**SAME), model="m", length=3)
    plain = handle.plain()
    assert json.loads(json.dumps(plain)) == plain == {"id": handle.id, "model": "m", "length": 3}
    again = MessageHandle.model_validate(json.loads(json.dumps(plain)))
    assert again == handle and hash(again) == hash(handle)


def test_a_handle_is_frozen() -> None:
    handle = MessageHandle(id=P, model="m", length=3)
    with pytest.raises(ValidationError, match="frozen"):
        handle.length = 4


@pytest.mark.parametrize(
    "wrong",
    [{"id": "0" * 31}, {"id": "0" * 33}, {"id": "G" * 32}, {"id": "F" * 32}, {"id": P + "\n"}, {"length": 0}, {"x": 1}],
    ids=str,
)
def test_a_malformed_handle_is_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError):
        MessageHandle.model_validate({"id": P, "model": "m", "length": 3} | wrong)


@pytest.mark.parametrize("missing", ["id", "model", "length"])
def test_every_field_of_a_handle_is_required(missing: str) -> None:
    fields = {"id": P, "model": "m", "length": 3}
    del fields[missing]
    with pytest.raises(ValidationError, match=missing):
        MessageHandle.model_validate(fields)
