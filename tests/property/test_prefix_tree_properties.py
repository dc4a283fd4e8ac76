"""Requests come, go and are cancelled over a prefix tree; a plain table of prefixes says what it must hold."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from choreo_agents.kv.geometry import KVGeometry
from choreo_agents.kv.pool import KVPool
from choreo_agents.kv.prefix_tree import PrefixMatch, PrefixTree
from choreo_agents.kv.segment import Segment

GEOMETRY = KVGeometry(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
TOKENS = 48
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
tails = st.lists(st.integers(0, 1), max_size=3).map(tuple)


@dataclass(eq=False)
class Running:
    """A request as the baseline method runs it: it reads the matched pieces and encodes the rest of its prompt."""

    prompt: tuple[int, ...]
    position: int
    segment: Segment
    pinned: list[Segment]


class TreeMachine(RuleBasedStateMachine):
    """`owner` says of every prefix in the tree which segment holds its last token, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(GEOMETRY, TOKENS * GEOMETRY.bytes_per_token, torch.device("cpu"), 1)
        self.tree = PrefixTree(self.pool)
        self.running: list[Running] = []
        self.owner: dict[tuple[int, ...], tuple[Segment, int]] = {}
        self.held: dict[Segment, list[int]] = {}

    @rule(prompt=prompts)
    def start(self, prompt: tuple[int, ...]) -> None:
        match = self.matched(prompt, len(prompt) - 1)
        if match.promised > match.encoded:
            return
        pinned = [piece.segment for piece in match.pieces]
        for segment in pinned:
            self.pool.pin(segment)
        room = len(prompt) - match.encoded + 3
        self.evict(room)
        segment = self.pool.allocate(room, match.encoded)
        if segment is None:
            for other in pinned:
                self.pool.unpin(other)
            return
        self.running.append(Running(prompt, match.encoded, segment, pinned))
        self.held[segment] = list(prompt[match.encoded :])
        self.insert(prompt, segment)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def encode(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(self.running)).segment
        segment.encoded = data.draw(st.integers(segment.encoded, len(self.held[segment])))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tail=tails)
    def finish(self, data: st.DataObject, tail: tuple[int, ...]) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.held[request.segment].extend(tail)
        request.segment.encoded = len(self.held[request.segment])
        self.pool.complete(request.segment)
        self.close(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.close(data.draw(st.sampled_from(self.running)))

    @rule(prompt=prompts, data=st.data())
    def match(self, prompt: tuple[int, ...], data: st.DataObject) -> None:
        self.matched(prompt, data.draw(st.integers(0, len(prompt))))

    @rule(tokens=st.integers(1, 8) | st.integers(1, TOKENS))
    def evict(self, tokens: int) -> None:
        """Nothing that a request reads or fills goes, and as much is freed as was promised."""
        promised = self.pool.free_tokens + self.tree.evictable_tokens()
        self.tree.evict(tokens)
        assert self.pool.free_tokens >= min(tokens, promised)
        kept = {prefix for prefix in self.owner if self.tree.match(prefix, len(prefix)).promised == len(prefix)}
        in_use = {s for request in self.running for s in (request.segment, *request.pinned)}
        assert not any(self.owner[prefix][0] in in_use for prefix in self.owner.keys() - kept)
        self.owner = {prefix: self.owner[prefix] for prefix in kept}

    @precondition(lambda self: not self.running)
    @rule()
    def evict_everything(self) -> None:
        self.tree.evict(TOKENS + 1)
        assert self.pool.free_tokens == self.pool.total_tokens and self.pool.live_segments() == 0
        self.owner.clear()

    @invariant()
    def accounts_agree(self) -> None:
        self.tree.check()
        self.pool.check()
        used = {segment for segment, _ in self.owner.values()} | {request.segment for request in self.running}
        assert self.pool.live_segments() == len(used | {s for request in self.running for s in request.pinned})

    def matched(self, prompt: tuple[int, ...], longest: int) -> PrefixMatch:
        """A match, compared with the table."""
        match = self.tree.match(prompt, longest)
        known = [self.owner.get(prompt[:end]) for end in range(1, longest + 1)]
        promised = known.index(None) if None in known else longest
        encoded = next((i for i in range(promised) if not self.is_encoded(prompt[: i + 1])), promised)
        assert (match.promised, match.encoded) == (promised, encoded)
        read: list[int] = []
        for piece in match.pieces:
            assert piece.shift == 0 and piece.offset + piece.first == len(read), "not where it was encoded"
            assert piece.count > 0 and piece.first + piece.count <= piece.segment.encoded
            read += self.held[piece.segment][piece.first : piece.first + piece.count]
        assert read == list(prompt[:encoded])
        return match

    def is_encoded(self, prefix: tuple[int, ...]) -> bool:
        segment, index = self.owner[prefix]
        return index < segment.encoded

    def insert(self, tokens: tuple[int, ...], segment: Segment) -> None:
        self.tree.insert(tokens, segment)
        for end in range(1, len(tokens) + 1):
            self.owner.setdefault(tokens[:end], (segment, end - 1 - segment.native_offset))

    def close(self, request: Running) -> None:
        self.running.remove(request)
        segment = request.segment
        self.tree.forget_unencoded(segment)
        lost = {p for p, (owner, _) in self.owner.items() if owner is segment and not self.is_encoded(p)}
        self.owner = {p: at for p, at in self.owner.items() if not any(p[: len(cut)] == cut for cut in lost)}
        whole = request.prompt[: request.position] + tuple(self.held[segment][: segment.encoded])
        self.insert(whole, segment)
        for other in (segment, *request.pinned):
            self.pool.unpin(other)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(stateful_step_count=50)


@given(st.lists(prompts, min_size=1, max_size=12), prompts)
def test_the_match_is_the_longest_prefix_shared_with_any_sequence(sequences, prompt) -> None:
    pool = KVPool(GEOMETRY, 128 * GEOMETRY.bytes_per_token, torch.device("cpu"), 1)
    tree = PrefixTree(pool)
    for tokens in sequences:
        segment = pool.allocate(len(tokens), 0)
        segment.encoded = len(tokens)
        tree.insert(tokens, segment)
        pool.unpin(segment)
    shared = max(n for n in range(len(prompt) + 1) if any(tokens[:n] == prompt[:n] for tokens in sequences))
    assert tree.match(prompt, len(prompt)).encoded == shared
