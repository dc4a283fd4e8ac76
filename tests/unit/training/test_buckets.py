"""Messages are cut into few buckets with little padding."""

from __future__ import annotations

import random

import pytest

from choreo_agents.training.packed import bucketed


@pytest.mark.parametrize("seed", range(5))
def test_every_message_is_in_one_bucket_that_is_as_long_as_its_longest(seed: int) -> None:
    rng = random.Random(seed)
    queries = [rng.randint(1, 60) for _ in range(rng.randint(1, 200))]
    keys = [query + rng.randint(0, 300) for query in queries]
    buckets = bucketed(queries, keys)
    assert sorted(number for bucket in buckets for number in bucket.members) == list(range(len(queries)))
    for bucket in buckets:
        assert bucket.queries == max(queries[number] for number in bucket.members)
        assert bucket.keys == max(keys[number] for number in bucket.members)


def test_one_long_message_does_not_stretch_the_short_ones() -> None:
    buckets = bucketed([500, *[15] * 50], [500, *[150] * 50])
    assert [(bucket.members, bucket.queries) for bucket in buckets] == [(tuple(range(1, 51)), 15), ((0,), 500)]
    alike = bucketed([140, *[15] * 50], [150] * 51)
    assert [(bucket.members, bucket.queries) for bucket in alike] == [(tuple(range(1, 51)), 15), ((0,), 140)]


def test_messages_of_like_lengths_share_a_bucket() -> None:
    assert len(bucketed([15, 14, 16, 13], [100, 101, 99, 97])) == 1


def test_padding_is_little_and_buckets_are_few() -> None:
    rng = random.Random(1)
    queries = [rng.randint(8, 22) for _ in range(600)]
    keys = [query + rng.randint(0, 150) for query in queries]
    buckets = bucketed(queries, keys)
    assert len(buckets) < 50
    padded = sum(len(bucket.members) * bucket.keys for bucket in buckets)
    assert padded < 1.1 * sum(keys)
