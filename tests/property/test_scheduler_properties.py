"""What every plan keeps to, and that no request waits for ever."""

from collections import deque
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from choreo_agents.runtime.loop import place_in_queue
from choreo_agents.runtime.scheduler import FirstComeFirstServed, Limits, Plan, Running, Waiting

plan_step = FirstComeFirstServed().plan
pending = st.one_of(st.just(1), st.integers(1, 40))


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Waiting], list[Running], int, Limits]:
    """No more are running than a step can serve, as earlier plans have left it."""
    limits = Limits(draw(st.integers(1, 8) | st.integers(1, 50)), draw(st.integers(1, 12)))
    counts = draw(st.just([]) | st.lists(pending, max_size=min(limits.max_num_seqs, limits.max_batched_tokens, 6)))
    ready = st.sampled_from([True, True, True, False])
    asked = draw(st.lists(st.tuples(st.integers(1, 30), ready, pending), max_size=8))
    waiting = [Waiting(100 + i, *rest) for i, rest in enumerate(asked)]
    return waiting, [Running(i, count) for i, count in enumerate(counts)], draw(st.integers(0, 90)), limits


@given(situations())
def test_admission_is_first_come_first_served_within_memory_and_rows(situation) -> None:
    """Except that one which fits may overtake when nothing runs that would give memory back."""
    waiting, running, free, limits = situation
    plan = plan_step(*situation)
    ready = [request for request in waiting if request.ready]
    most = min(limits.max_num_seqs, limits.max_batched_tokens) - len(running)
    fitting = next((n for n in range(len(ready)) if sum(r.room for r in ready[: n + 1]) > free), len(ready))
    wanted = ready[: min(fitting, most)]
    if not wanted and not running:
        wanted = [request for request in ready if request.room <= free][:1]
    assert plan.admitted == tuple(request.number for request in wanted)


@given(situations())
def test_a_request_is_stuck_only_if_nothing_runs_and_nothing_fits(situation) -> None:
    waiting, running, free, _ = situation
    ready = [request for request in waiting if request.ready]
    stuck = ready and not running and all(request.room > free for request in ready)
    assert plan_step(*situation).stuck == ((ready[0].number,) if stuck else ())


@given(situations())
def test_everyone_is_served_and_what_is_left_goes_to_the_first(situation) -> None:
    waiting, running, _, limits = situation
    plan = plan_step(*situation)
    admitted = [request for request in waiting if request.number in plan.admitted]
    needs = [(request.number, request.pending) for request in (*running, *admitted)]
    assert [number for number, _ in plan.chunks] == [number for number, _ in needs]
    counts, wanted = [count for _, count in plan.chunks], [count for _, count in needs]
    assert all(1 <= count <= most for count, most in zip(counts, wanted, strict=True))
    assert sum(counts) == min(limits.max_batched_tokens, sum(wanted))
    in_part = next((i for i, (count, most) in enumerate(zip(counts, wanted, strict=True)) if count < most), len(counts))
    assert all(count == 1 for count in counts[in_part + 1 :]), "a later one got more"


@given(situations())
def test_the_same_situation_gives_the_same_plan(situation) -> None:
    waiting, running, free, limits = situation
    assert plan_step(waiting, running, free, limits) == plan_step(tuple(waiting), tuple(running), free, limits)


@st.composite
def chained(draw: st.DrawFn) -> tuple[list[Waiting], list[Running], int, Limits]:
    """Some wait for others, which wait or run; most of these are encoded in one step."""
    limits = Limits(draw(st.integers(8, 60)), draw(st.integers(2, 12)))
    running = [Running(number, draw(st.integers(1, 5))) for number in range(draw(st.integers(0, 2)))]
    waiting: list[Waiting] = []
    for number in range(100, 100 + draw(st.integers(1, 8))):
        before = [each.number for each in (*running, *waiting)]
        after = draw(st.lists(st.sampled_from(before), max_size=2)) if before else []
        ready = not after and draw(st.sampled_from([True, True, True, False]))
        waiting.append(Waiting(number, draw(st.integers(1, 30)), ready, draw(st.integers(1, 12)), tuple(after)))
    return waiting, running, draw(st.integers(0, 90)), limits


@given(chained())
def test_what_follows_shares_the_step_that_ends_what_it_waits_for(situation) -> None:
    waiting, running, free, limits = situation
    plan = plan_step(*situation)
    plain = plan_step([replace(each, after=()) for each in waiting], running, free, limits)
    assert plan.stuck == plain.stuck
    assert plan.admitted[: len(plain.admitted)] == plain.admitted, "nobody gives way to what follows"
    assert plan.chunks[: len(plain.chunks)] == plain.chunks
    assert sum(count for _, count in plan.chunks) <= limits.max_batched_tokens
    assert len(plan.chunks) <= max(limits.max_num_seqs, len(plain.chunks))
    by_number = {each.number: each for each in waiting}
    if any(each.ready and each.number not in plain.admitted for each in waiting):
        assert plan == plain, "nobody overtakes who waits for memory or a row"
    assert sum(by_number[number].room for number in plan.admitted) <= free
    pending = {each.number: each.pending for each in (*running, *waiting)}
    for place, (number, count) in enumerate(plan.chunks[len(plain.chunks) :], start=len(plain.chunks)):
        done = {earlier for earlier, encoded in plan.chunks[:place] if encoded == pending[earlier]}
        assert number in plan.admitted and by_number[number].after and done.issuperset(by_number[number].after)
        assert 1 <= count <= pending[number]


@given(chained())
def test_nothing_that_could_follow_is_left_out(situation) -> None:
    """Unless the step, its rows or the memory are used up, or somebody before it waits for memory."""
    waiting, running, free, limits = situation
    plan = plan_step(*situation)
    pending = {each.number: each.pending for each in (*running, *waiting)}
    whole = {number for number, count in plan.chunks if count == pending[number]}
    left_out = [w for w in waiting if w.after and w.number not in plan.admitted and whole.issuperset(w.after)]
    rooms = sum(each.room for each in waiting if each.number in plan.admitted)
    ready_left = any(each.ready and each.number not in plan.admitted for each in waiting)
    full = (
        sum(count for _, count in plan.chunks) == limits.max_batched_tokens or len(plan.chunks) >= limits.max_num_seqs
    )
    if left_out and not full and not ready_left:
        # Who follows keeps its turn: the first that finds no room holds up the rest.
        assert any(each.room > free - rooms for each in left_out)


@dataclass
class Job:
    number: int
    prompt: int
    samples: int
    arrives: int

    @property
    def room(self) -> int:
        return self.prompt + self.samples


class Loop:
    """A simulated engine: as the real one it encodes what is planned and samples when a prompt is encoded."""

    def __init__(self, memory: int, limits: Limits) -> None:
        self.free = memory
        self.limits = limits
        self.waiting: list[Job] = []
        self.running: dict[int, tuple[Job, int, int]] = {}
        self.finished: list[int] = []
        self.admitted: list[int] = []

    def step(self) -> Plan:
        plan = plan_step(
            [Waiting(job.number, job.room, pending=job.prompt) for job in self.waiting],
            [Running(number, left) for number, (_, left, _) in self.running.items()],
            self.free,
            self.limits,
        )
        assert not plan.stuck
        for number in plan.admitted:
            job = next(job for job in self.waiting if job.number == number)
            self.waiting.remove(job)
            self.free -= job.room
            assert self.free >= 0
            self.running[number] = (job, job.prompt, job.samples)
            self.admitted.append(number)
        for number, count in plan.chunks:
            job, left, samples = self.running[number]
            if left > count:
                self.running[number] = (job, left - count, samples)
            elif samples:
                self.running[number] = (job, 1, samples - 1)
            else:
                del self.running[number]
                self.free += job.room
                self.finished.append(number)
        return plan


jobs = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8), st.integers(0, 20)), min_size=1, max_size=12)


@given(jobs, st.integers(1, 16), st.integers(1, 6), st.integers(40, 90))
def test_everything_finishes_in_the_time_its_tokens_take(asked, step_tokens, rows, memory) -> None:
    """Every step with work does some: a bound on the steps follows from the tokens, whatever the limits."""
    arriving = deque(sorted((Job(i, *rest) for i, rest in enumerate(asked)), key=lambda job: job.arrives))
    order = [job.number for job in arriving]
    tokens = sum(job.room for job in arriving)
    loop = Loop(memory, Limits(step_tokens, rows))
    for now in range(tokens + 21):
        while arriving and arriving[0].arrives <= now:
            loop.waiting.append(arriving.popleft())
        loop.step()
    assert sorted(loop.finished) == sorted(order)
    assert loop.admitted == order
    assert loop.free == memory


def prefill_finishes(prompt: int, samples: int, limits: Limits, *, steps: int) -> bool:
    """Whether one long prefill ends though short calls keep coming, as many as are served at once."""
    loop = Loop(10_000, limits)
    for now in range(steps):
        number = 1000 * (now + 1)
        loop.waiting.extend(Job(number + i, 1, samples, now) for i in range(limits.max_num_seqs - len(loop.waiting)))
        if now == 0:
            loop.waiting.insert(limits.max_num_seqs // 2, Job(0, prompt, 0, 0))
        loop.step()
    return 0 in loop.finished


@given(st.integers(1, 12), st.integers(1, 60), st.integers(0, 4), st.data())
def test_a_long_prefill_is_not_starved_by_short_calls_that_never_end(rows, prompt, samples, data) -> None:
    assert prefill_finishes(prompt, samples, Limits(data.draw(st.integers(rows, 2 * rows)), rows), steps=prompt)


def test_a_long_prefill_is_not_starved_when_a_step_has_fewer_tokens_than_rows() -> None:
    """An engine serves up to 256 requests at once and lets its user set any `max_batched_tokens`."""
    assert prefill_finishes(20, 3, Limits(max_batched_tokens=4, max_num_seqs=8), steps=1000)


@given(jobs, st.integers(1, 16), st.integers(1, 6))
def test_whatever_runs_is_served_in_every_step(asked, step_tokens: int, rows: int) -> None:
    loop = Loop(1000, Limits(step_tokens, rows))
    loop.waiting.extend(Job(i, prompt, samples, 0) for i, (prompt, samples, _) in enumerate(asked))
    while loop.waiting or loop.running:
        running = set(loop.running)
        assert running <= {number for number, _ in loop.step().chunks}


@dataclass
class InQueue:
    number: int
    priority: int
    overtaken: int = 0


def bubbled(queue: list[InQueue], new: InQueue, most: int) -> list[InQueue]:
    """The slow way: a newcomer changes places with whoever stands before it, as long as that one lets it pass."""
    after = [*queue, new]
    for at in range(len(queue), 0, -1):
        before = after[at - 1]
        if before.priority >= new.priority or before.overtaken >= most:
            break
        after[at - 1], after[at] = new, before
        before.overtaken += 1
    return after


@given(st.lists(st.one_of(st.integers(0, 3), st.just(None)), max_size=60), st.integers(0, 5))
def test_the_queue_is_first_come_first_served_within_a_priority_and_starves_nobody(arrivals, most: int) -> None:
    """None stands for a request that is admitted, from the front of the queue."""
    queue: list[InQueue] = []
    slow: list[InQueue] = []
    admitted: list[InQueue] = []
    for number, priority in enumerate(arrivals):
        if priority is None:
            if queue:
                admitted.append(queue.pop(0))
                slow.pop(0)
            continue
        at = place_in_queue(queue, priority, most)
        for overtaken in queue[at:]:
            overtaken.overtaken += 1
        queue.insert(at, InQueue(number, priority))
        slow = bubbled(slow, InQueue(number, priority), most)
        assert queue == slow
    served = [*admitted, *queue]
    for one in served:
        earlier = [other.number for other in served[: served.index(one)] if other.priority == one.priority]
        assert all(number < one.number for number in earlier)
        overtakers = [other for other in served[: served.index(one)] if other.number > one.number]
        assert len(overtakers) == one.overtaken <= most and all(o.priority > one.priority for o in overtakers)


@dataclass
class Simulated:
    """One request of the brute-force engine, which serves token by token instead of by plan."""

    number: int
    prompt: int
    samples: int
    ends: int = -1


def brute_force(jobs: list[Job], memory: int, limits: Limits) -> dict[int, int]:
    """In which step each job ends, when every step's tokens are handed out one at a time.

    Admission: the first in the queue, again and again, while a row and its room are left. Tokens: one to each in the
    order of admission, then, to the first that can take one, another, until the step has no more.
    """
    queue = deque(jobs)
    active: list[Simulated] = []
    rooms = {job.number: job.room for job in jobs}
    ends: dict[int, int] = {}
    step = 0
    while queue or active:
        while queue and len(active) < min(limits.max_num_seqs, limits.max_batched_tokens) and queue[0].room <= memory:
            job = queue.popleft()
            memory -= job.room
            active.append(Simulated(job.number, job.prompt, job.samples))
        got = dict.fromkeys((one.number for one in active), 0)
        for _ in range(limits.max_batched_tokens):
            # A prompt's tokens can all go into one step; what is sampled at its end goes into the next.
            hungry = [one for one in active if got[one.number] < max(one.prompt, 1)]
            if hungry:
                first = next((one for one in hungry if not got[one.number]), hungry[0])
                got[first.number] += 1
        for one in list(active):
            if one.prompt > got[one.number]:
                one.prompt -= got[one.number]
            elif one.samples:
                one.prompt, one.samples = 1, one.samples - 1
            else:
                active.remove(one)
                ends[one.number] = step
                memory += rooms[one.number]
        step += 1
    return ends


@given(jobs, st.integers(1, 16), st.integers(1, 6), st.integers(40, 90))
def test_a_run_is_the_one_that_brute_force_simulates(asked, step_tokens: int, rows: int, memory: int) -> None:
    arrived = [Job(i, prompt, samples, 0) for i, (prompt, samples, _) in enumerate(asked)]
    limits = Limits(step_tokens, rows)
    loop = Loop(memory, limits)
    loop.waiting = list(arrived)
    ended: dict[int, int] = {}
    for step in range(sum(job.room for job in arrived) + 1):
        loop.step()
        ended |= {number: step for number in loop.finished if number not in ended}
    assert ended == brute_force(arrived, memory, limits)
