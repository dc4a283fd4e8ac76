"""Runs over traces: killed and resumed to the same bits, the best kept, what is no number stopped."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import save_tiny_llama
from support.traces import draw_trace
from support.tuning import (
    DrawnSource,
    FixedSource,
    KilledError,
    Killer,
    draw_examples,
    full_disk,
    held_out,
    make_tuning,
    same,
)
from transformers import AutoModelForCausalLM

from choreo_agents.engine.adapters import read_loaded
from choreo_agents.errors import AdapterError, InvalidRequestError, TrainingError
from choreo_agents.models import LoadedModel, load_model
from choreo_agents.training.checkpoints import reserved
from choreo_agents.training.forward import TraceForward
from choreo_agents.training.settings import TuneSettings
from choreo_agents.training.trace import Trace, TraceMessage
from choreo_agents.training.tuned import TUNED, Tuned, target_modules
from choreo_agents.training.tuning import CARD_FILE, EvalScore, Example, TrainingProgress, Tuning, run_and_keep


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of files would wait for the disk."""
    monkeypatch.setattr("os.fsync", lambda _: None)


def ended(tuning: Tuning, *, every_s: float = 0.0, killer: Killer | None = None) -> Tuning:
    tuning.run(killer or Killer(), checkpoint_every_s=every_s)
    return tuning


def measured(outcome: TrainingProgress) -> TrainingProgress:
    return replace(outcome, seconds=0.0)


@pytest.fixture(scope="module")
def whole(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return ended(make_tuning(tiny, tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def steps(whole: Tuning) -> int:
    """Batches of an epoch."""
    found = whole.outcome.steps // 3
    assert found >= 3, "there is a middle of an epoch"
    return found


@pytest.mark.parametrize(
    "kills", [("middle",), ("last",), ("scored",), ("middle", "middle"), ("scored", "first", "last")]
)
@pytest.mark.parametrize("every_s", [0.0, 1e9], ids=["each batch", "each epoch"])
def test_a_killed_run_ends_with_the_same_bits(
    tiny: LoadedModel, whole: Tuning, steps: int, tmp_path: Path, kills: tuple[str, ...], every_s: float
) -> None:
    at = {"first": 1, "middle": steps + 1 + steps // 2, "last": steps, "scored": steps + 1}
    for kill in kills:
        torch.manual_seed(random.randrange(10**6))  # what else the process draws does not matter
        with pytest.raises(KilledError):
            ended(make_tuning(tiny, tmp_path), every_s=every_s, killer=Killer(at[kill]))
    resumed = ended(make_tuning(tiny, tmp_path), every_s=every_s)
    assert same(resumed.tuned.state(), whole.tuned.state())
    assert measured(resumed.outcome) == measured(whole.outcome)


def test_a_run_that_is_killed_while_it_is_judged_goes_on(tiny: LoadedModel, whole: Tuning, tmp_path: Path) -> None:
    def judge(tuned: Tuned) -> Callable[[int], EvalScore]:
        def dead(epoch: int) -> EvalScore:
            if epoch == 2:
                raise KilledError
            return own(epoch)

        own = held_out(tuned, [e.trace for e in draw_examples(2, seed=99)])
        return dead

    with pytest.raises(KilledError):
        ended(make_tuning(tiny, tmp_path, judge=judge))
    assert same(ended(make_tuning(tiny, tmp_path)).tuned.state(), whole.tuned.state())


def test_epochs_of_their_own_examples_are_resumed(tiny: LoadedModel, tmp_path: Path) -> None:
    one = ended(make_tuning(tiny, tmp_path / "whole", source=DrawnSource()))
    with pytest.raises(KilledError):
        ended(make_tuning(tiny, tmp_path, source=DrawnSource()), killer=Killer(one.outcome.steps // 2 + 1))
    assert same(ended(make_tuning(tiny, tmp_path, source=DrawnSource())).tuned.state(), one.tuned.state())


def test_a_seed_decides_weights_order_and_dropout(tiny: LoadedModel, whole: Tuning, tmp_path: Path) -> None:
    assert same(ended(make_tuning(tiny, tmp_path / "again")).tuned.state(), whole.tuned.state())
    assert not same(ended(make_tuning(tiny, tmp_path / "other", seed=1)).tuned.state(), whole.tuned.state())


def test_a_finished_run_has_nothing_left_to_do(tiny: LoadedModel, tmp_path: Path) -> None:
    first = ended(make_tuning(tiny, tmp_path))
    killer = Killer()
    again = ended(make_tuning(tiny, tmp_path), killer=killer)
    assert killer.heard == [] and again.outcome == first.outcome
    assert same(again.tuned.state(), first.tuned.state()) and first.outcome.seconds > 0


def test_progress_counts_what_all_processes_have_done(tiny: LoadedModel, steps: int, tmp_path: Path) -> None:
    killer, rest = Killer(steps + 2), Killer()
    with pytest.raises(KilledError):
        ended(make_tuning(tiny, tmp_path), killer=killer)
    resumed = ended(make_tuning(tiny, tmp_path), killer=rest)
    again = rest.heard[0]
    assert (again.tokens, again.steps) == (killer.heard[-1].tokens, killer.heard[-1].steps), "it had not been saved"
    assert [passage.seconds for passage in rest.heard] == sorted(passage.seconds for passage in rest.heard)
    assert again.seconds > killer.heard[-3].seconds
    assert resumed.outcome.tokens == 3 * killer.heard[steps].tokens
    assert rest.heard[-1].epoch == rest.heard[-1].epochs == 3


class Script:
    """Judges by a list of scores, and remembers the weights that it saw."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, tuned: Tuned) -> Callable[[int], EvalScore]:
        def judge(epoch: int) -> EvalScore:
            assert epoch == len(self.seen)
            self.seen.append(tuned.state())
            return EvalScore(self.scores[epoch])

        return judge


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_rates_rise_and_fall_to_what_is_left_at_the_end(tiny: LoadedModel, tmp_path: Path, final: float) -> None:
    tuning = make_tuning(tiny, tmp_path, final_rate=final, learning_rate=2e-3, mapper_learning_rate=4e-3, warmup=0.1)
    rates: list[list[float]] = []
    for hundredth in range(101):
        tuning._set_rates(hundredth / 100)
        rates.append([group["lr"] for group in tuning._optimizer.param_groups])
    assert all(mapper == pytest.approx(2 * adapter) for adapter, mapper in rates)
    adapter = [first for first, _ in rates]
    assert 0 < adapter[0] < adapter[5] < adapter[10] and adapter[10] == pytest.approx(2e-3, rel=0.03)
    assert adapter[10:] == sorted(adapter[10:], reverse=True) and adapter[-1] == pytest.approx(final * 2e-3)


def test_progress_tells_the_loss_of_the_epoch_that_has_ended(tiny: LoadedModel, tmp_path: Path) -> None:
    heard = Killer()
    tuning = ended(make_tuning(tiny, tmp_path), killer=heard)
    ends = [passage.loss for passage in heard.heard if not passage.batches]
    assert ends == [each["loss"] for each in tuning.outcome.history[1:]] and len(ends) == 3


def test_the_best_is_kept_and_a_run_without_a_better_one_stops(tiny: LoadedModel, tmp_path: Path) -> None:
    script = Script(0.1, 0.5, 0.4, 0.5, 0.9)
    tuning = ended(make_tuning(tiny, tmp_path, judge=script, epochs=9, patience=2))
    assert (tuning.outcome.epoch, tuning.outcome.best_epoch, tuning.outcome.best) == (3, 1, EvalScore(0.5))
    assert same(tuning.tuned.state(), script.seen[1]) and not same(script.seen[1], script.seen[3])
    assert [each["held_out_score"] for each in tuning.outcome.history] == [0.1, 0.5, 0.4, 0.5]


def test_where_the_last_are_to_be_kept_no_score_stops_a_run(tiny: LoadedModel, tmp_path: Path) -> None:
    script = Script(0.0, 0.5, 0.4, 0.3)
    tuning = ended(make_tuning(tiny, tmp_path, judge=script, epochs=3, patience=1, keep="last"))
    assert (tuning.outcome.epoch, tuning.outcome.best_epoch, tuning.outcome.best) == (3, 3, EvalScore(0.3))
    assert same(tuning.tuned.state(), script.seen[3]) and not same(script.seen[3], script.seen[1])


def test_where_nothing_gets_better_the_weights_are_those_of_the_beginning(tiny: LoadedModel, tmp_path: Path) -> None:
    script = Script(0.5, 0.4, 0.3)
    tuning = ended(make_tuning(tiny, tmp_path, judge=script, patience=2))
    assert tuning.outcome.best_epoch == 0 and same(tuning.tuned.state(), script.seen[0])
    assert not any(tensor.any() for name, tensor in tuning.tuned.state().items() if name.endswith("up"))


@pytest.mark.parametrize(
    ("one", "other"), [((0.5, 2.0), (0.5, 1.9)), ((0.4, 1.0), (0.5, 2.0)), ((0.5, None), (0.6, None))]
)
def test_equal_scores_are_told_apart_by_the_loss(one: Any, other: Any) -> None:
    assert EvalScore(*one).rank < EvalScore(*other).rank


def test_training_lowers_the_loss_and_leaves_the_model_alone(tiny_path: Path, tmp_path: Path) -> None:
    model = load_model(tiny_path)
    before = {name: tensor.clone() for name, tensor in model.adapter.model.state_dict().items()}
    tuning = ended(make_tuning(model, tmp_path, epochs=6, dropout=0.0))
    losses = [each["held_out_loss"] for each in tuning.outcome.history]
    trained = [each["loss"] for each in tuning.outcome.history[1:]]
    assert trained[-1] < 0.9 * trained[0] and trained == sorted(trained, reverse=True) and losses[0] is not None
    assert same(before, dict(model.adapter.model.state_dict()))
    assert all(p.grad is None and not p.requires_grad for p in model.adapter.model.parameters())


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_imitation_is_the_divergence_from_the_teachers_distributions(
    tiny: LoadedModel, tiny_path: Path, tmp_path: Path, share: float
) -> None:
    """By hand: the student's from the packed pass, the teacher's from plain prompts without anything of ours."""
    examples = draw_examples(4, mapped=False)
    tuning = make_tuning(
        tiny, tmp_path, source=FixedSource(examples), imitation=share, epochs=1, batch_tokens=10**6, mapper_rank=0
    )
    killer = Killer()
    with torch.no_grad():
        said = TraceForward(tiny, adapters={TUNED: tuning.tuned.lora}).logits([e.trace for e in examples])  # type: ignore[dict-item]
    ended(tuning, killer=killer)
    plain = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    whole, at = 0.0, 0
    divergences: list[float] = []
    for example in examples:
        for message in example.trace.messages:
            if message.learn is None:
                continue
            told = None
            if example.teacher is not None:
                twin = example.teacher.by_name[message.name]
                assert twin.learn is not None
                with torch.no_grad():
                    logits = plain(input_ids=torch.tensor([twin.tokens])).logits[0]
                told = logits[twin.learn[0] - 1 : twin.learn[1] - 1].double().softmax(-1)
            for row, token in enumerate(message.tokens[slice(*message.learn)]):
                own = said.logits[at].double().log_softmax(-1)
                at += 1
                surprise = -float(own[token])
                if told is None:
                    whole += surprise
                else:
                    divergence = float((told[row] * (told[row].log() - own)).sum())
                    divergences.append(divergence)
                    whole += (1 - share) * surprise + share * divergence
    assert killer.heard[0].loss == pytest.approx(whole / at, abs=1e-4)
    assert max(divergences) > 0.1, "a teacher sees its words otherwise"


def test_without_imitation_a_teacher_is_not_asked(tiny: LoadedModel, tmp_path: Path) -> None:
    taught = FixedSource(draw_examples(4))
    alone = FixedSource([Example(example.trace) for example in taught.examples])
    one = ended(make_tuning(tiny, tmp_path / "one", source=taught, imitation=0.0))
    assert same(
        one.tuned.state(), ended(make_tuning(tiny, tmp_path / "two", source=alone, imitation=0.0)).tuned.state()
    )
    other = ended(make_tuning(tiny, tmp_path / "three", source=taught, imitation=0.9))
    assert not same(one.tuned.state(), other.tuned.state())


def test_a_teacher_that_says_other_words_is_noticed(tiny: LoadedModel, tmp_path: Path) -> None:
    one, two = draw_examples(1, seed=1)[0], draw_examples(1, seed=2)[0]
    with pytest.raises((AssertionError, RuntimeError)):
        ended(make_tuning(tiny, tmp_path, source=FixedSource([Example(one.trace, two.teacher)])))


def test_dropout_is_for_training_only(tiny: LoadedModel, tmp_path: Path) -> None:
    """Once something is learnt: at first the adapter adds nothing that could be dropped."""
    tuning = ended(make_tuning(tiny, tmp_path, dropout=0.5, mapper_rank=0, epochs=2))
    lora = tuning.tuned.lora
    assert lora is not None and lora.dropout == 0.5
    traces = [example.trace for example in draw_examples(2, mapped=False)]
    forward = TraceForward(tiny, adapters={TUNED: lora})
    torch.manual_seed(1)
    assert float(forward.losses(traces).mean.detach()) != float(forward.losses(traces).mean.detach())
    tuning.tuned.save(tmp_path / "saved")
    served = tiny.adapter.read_adapter(tmp_path / "saved")
    with torch.no_grad():
        loss = float(TraceForward(tiny, adapters={TUNED: served}).losses(traces).mean)
    judge = held_out(tuning.tuned, traces)
    assert loss == judge(0).loss == judge(0).loss
    assert lora.dropout == 0.5


RANKS = [(2, 0), (0, 2), (2, 2)]


@pytest.mark.parametrize("alphas", [(8, 8), (8, 16)])
@pytest.mark.parametrize("old", RANKS)
@pytest.mark.parametrize("new", RANKS)
def test_a_kill_while_it_is_saved_leaves_all_of_one_or_what_nobody_loads(
    tiny: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: tuple[int, int],
    new: tuple[int, int],
    alphas: tuple[int, int],
) -> None:
    class Killed(BaseException):
        pass

    def tuned(seed: int, rank: int, mapper_rank: int) -> Tuned:
        made = Tuned(tiny, TuneSettings(rank=rank, mapper_rank=mapper_rank, seed=seed, alpha=alphas[seed - 1]))
        made.load_state({name: value + seed for name, value in made.state().items()})
        return made

    def served(out: Path) -> tuple[str, str] | None:
        try:
            found = read_loaded(tiny.adapter, out)
        except AdapterError:
            return None
        return found.lora_key, found.mapper_key

    one, two, left = tuned(1, *old), tuned(2, *new), [99]
    two.save(tmp_path / "new")
    acts = Path.replace, Path.unlink

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(path: Path, *args: Any, **options: Any) -> Any:
            if out in (path.parent, *(each.parent for each in args)):
                if not left[0]:
                    raise Killed
                left[0] -= 1
            return act(path, *args, **options)

        return acting

    for steps in itertools.count():
        out = tmp_path / str(steps)
        left[0] = 99
        one.save(out)
        (out / ".partial-of-a-kill").mkdir()
        before, after = served(out), served(tmp_path / "new")
        monkeypatch.setattr(Path, "replace", counted(acts[0]))
        monkeypatch.setattr(Path, "unlink", counted(acts[1]))
        left[0] = steps
        try:
            two.save(out)
        except Killed:
            assert served(out) in (before, after, None)
        else:
            assert served(out) == after != before and not list(out.glob(".partial*"))
            break
        finally:
            monkeypatch.undo()
    assert steps >= 1


@pytest.mark.parametrize(("rank", "mapper_rank"), [(4, 0), (0, 4), (4, 4), (0, None)])
def test_only_what_has_a_rank_is_trained_and_saved(
    tiny: LoadedModel, tmp_path: Path, rank: int, mapper_rank: int | None
) -> None:
    out = tmp_path / "out"
    Tuned(tiny, TuneSettings(rank=2, mapper_rank=2)).save(out)
    script = Script(0.1, 0.2)
    tuning = make_tuning(tiny, tmp_path, judge=script, rank=rank, mapper_rank=mapper_rank, epochs=1)
    before = tuning.tuned.state()
    ended(tuning)
    sides = {name.rpartition(".")[0] == "mapper" for name in before}
    assert sides == {part for part, there in ((False, rank), (True, mapper_rank != 0)) if there}
    changed = {name for name, tensor in tuning.tuned.state().items() if not torch.equal(tensor, before[name])}
    assert {name for name in before if name.endswith("up")} <= changed
    tuning.tuned.save(out)
    adapter = {"adapter_config.json", "adapter_model.safetensors"} if rank else set()
    mapper = {"mapper.safetensors"} if mapper_rank != 0 else set()
    assert {path.name for path in out.iterdir()} == adapter | mapper, "what was there before would be served as well"


def test_nothing_to_train_and_unknown_layers_are_refused(tiny: LoadedModel) -> None:
    with pytest.raises(TrainingError, match="there is nothing to train"):
        Tuned(tiny, TuneSettings(rank=0))
    with pytest.raises(TrainingError, match="no layer called q_project: it has down_proj, gate_proj, k_proj"):
        Tuned(tiny, TuneSettings(targets=("q_proj", "q_project")))
    assert len(target_modules(tiny, ("q_proj", "v_proj"))) == 6 and len(target_modules(tiny, ())) == 21
    only = Tuned(tiny, TuneSettings(targets=("v_proj",), rank=2)).named_parameters()
    assert {name.rpartition(".")[0].rpartition(".")[2] for name, _ in only} == {"v_proj"}
    with pytest.raises(AdapterError, match="rank must be from"):
        Tuned(tiny, TuneSettings(rank=0, mapper_rank=10**4))


def poisoned(folder: Path) -> tuple[LoadedModel, list[Example]]:
    """A model that has no number for one token, and examples of which one says it."""
    model = load_model(save_tiny_llama(folder))
    model.adapter.model.get_input_embeddings().weight.data[370] = float("nan")
    words = TraceMessage("m", (5, 370, 6, 7), learn=(2, 4), adapter=TUNED)
    good = draw_examples(3, mapped=False)
    return model, [good[0], Example(Trace("bad one", (words,))), *good[1:]]


@pytest.mark.parametrize("batch_tokens", [1, 10**6], ids=["alone", "among others"])
def test_a_loss_that_is_no_number_names_its_trace_and_the_best_is_kept(tmp_path: Path, batch_tokens: int) -> None:
    model, examples = poisoned(tmp_path / "model")

    class Later:
        digest = "later"

        def epoch(self, number: int) -> list[Example]:
            return examples if number == 2 else [e for e in examples if e.trace.id != "bad one"]

    def run() -> tuple[Script, Tuning]:
        script = Script(0.1, 0.9, 0.2)
        tuning = make_tuning(
            model, tmp_path, source=Later(), judge=script, mapper_rank=0, imitation=0, batch_tokens=batch_tokens
        )
        with pytest.raises(TrainingError, match=r"at trace 'bad one' \(epoch 3\): the weights of epoch 1 are kept"):
            run_and_keep(tuning, tmp_path / "out", Killer(), lambda _: {})
        return script, tuning

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / CARD_FILE).write_text("{}")
    script, tuning = run()
    assert same(tuning.tuned.state(), script.seen[1]) and tuning.ended
    assert not (tmp_path / "out" / CARD_FILE).exists(), "it spoke of other weights"
    kept = model.adapter.read_adapter(tmp_path / "out")
    assert all(torch.equal(part.up, tuning.tuned.lora.parts[name].up) for name, part in kept.parts.items())  # type: ignore[union-attr]
    _, again = run()
    assert same(again.tuned.state(), tuning.tuned.state()), "its checkpoints can be read"


def test_an_infinite_gradient_names_its_traces(tiny: LoadedModel, tmp_path: Path) -> None:
    tuning = make_tuning(tiny, tmp_path)
    next(iter(tuning.tuned.named_parameters()))[1].register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(TrainingError, match=r"the gradient of 'trace \d'.*\(epoch 1\): the weights of epoch 0"):
        ended(tuning)
    assert all(tensor.isfinite().all() for tensor in tuning.tuned.state().values())


def test_an_interrupted_run_leaves_what_is_in_its_folder(tiny: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_and_keep(make_tuning(tiny, tmp_path / "one", epochs=1), out, Killer(), lambda _: {"who": "one"})
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(KilledError):
        run_and_keep(make_tuning(tiny, tmp_path / "two", seed=1), out, Killer(4), lambda _: {"who": "two"})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_finished_run_keeps_its_card_and_another_writes_its_own(tiny: LoadedModel, tmp_path: Path) -> None:
    def card(run: str, command: str, **changes: Any) -> dict[str, Any]:
        tuning = make_tuning(tiny, tmp_path / run, **{"epochs": 1, **changes})
        return run_and_keep(tuning, tmp_path / "out", Killer(), lambda _: {"who": "me"}, command=command)

    first = card("one", "first")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert card("one", "second") == first
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
    assert first["command"] == "first" and first["steps"] > 0 and first["who"] == "me"
    assert first["share_of_model"] == first["parameters"] / tiny.adapter.parameters > 0
    other = card("two", "third", seed=1)
    assert other["command"] == "third" and other["settings"]["seed"] == 1
    (tmp_path / "out" / CARD_FILE).write_text("{ half a")
    assert card("two", "fourth", seed=1) == other


def test_another_runs_checkpoint_is_refused_by_name(tiny: LoadedModel, tiny_path: Path, tmp_path: Path) -> None:
    ended(make_tuning(tiny, tmp_path, epochs=1))
    for name, changes in {
        "settings": {"epochs": 2},
        "data": {"epochs": 1, "source": FixedSource(draw_examples(4))},
        "held-out data": {"epochs": 1, "judged_by": "other items"},
        "settings and data": {"epochs": 2, "source": FixedSource(draw_examples(4))},
    }.items():
        with pytest.raises(
            TrainingError, match=f"was written by a run with other {name}: continue with the same settings"
        ):
            ended(make_tuning(tiny, tmp_path, **changes))  # type: ignore[arg-type]
    other = load_model(save_tiny_llama(tmp_path / "other", seed=5))
    with pytest.raises(TrainingError, match="with other weights"):
        ended(make_tuning(other, tmp_path, epochs=1))


def test_a_damaged_checkpoint_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    ended(make_tuning(tiny, tmp_path, epochs=1))
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(torch.load(path) | {"progress": None}, tmp_path / "part.pt")
    wrong = [b"", b"no file of ours", (tmp_path / "list.pt").read_bytes(), (tmp_path / "part.pt").read_bytes()]
    for content in [*wrong, *(whole[: len(whole) * part // 7] for part in range(1, 7))]:
        path.write_bytes(content)
        with pytest.raises(TrainingError, match=r"checkpoint .* cannot be read: remove it"):
            ended(make_tuning(tiny, tmp_path, epochs=1))
    path.write_bytes(whole)
    ended(make_tuning(tiny, tmp_path, epochs=1))


@pytest.mark.parametrize("most_bytes", [0, 100, 20_000])
def test_a_full_disk_leaves_the_checkpoint_that_was_there(tiny: LoadedModel, tmp_path: Path, most_bytes: int) -> None:
    with pytest.raises(KilledError):
        ended(make_tuning(tiny, tmp_path), killer=Killer(3))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(most_bytes), pytest.raises(OSError, match=r"cannot be written|too large"):
        ended(make_tuning(tiny, tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    ended(make_tuning(tiny, tmp_path))


@pytest.mark.parametrize("most_bytes", [0, 3_000, 30_000])
def test_a_full_disk_leaves_the_weights_that_were_there(tiny: LoadedModel, tmp_path: Path, most_bytes: int) -> None:
    tuned = Tuned(tiny, TuneSettings(rank=4, mapper_rank=32, targets=("v_proj",)))
    tuned.save(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with torch.no_grad():
        for _, parameter in tuned.named_parameters():
            parameter.add_(1.0)
    with full_disk(most_bytes), pytest.raises(OSError, match=r"cannot be written|too large|Error"):
        tuned.save(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    tuned.save(tmp_path / "out")
    assert all((tmp_path / "out" / name).read_bytes() != content for name, content in before.items() if "safe" in name)


def test_nothing_to_learn_from_is_an_error(tiny: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="epoch 1 has no example to learn from"):
        ended(make_tuning(tiny, tmp_path, source=FixedSource([Example(draw_trace(random.Random(1), 2))][:0])))


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(InvalidRequestError, match=r"another run is using .*new'")
    with reserved(tmp_path / "new"), refused, reserved(tmp_path / "new"):
        pass
    with reserved(tmp_path / "new"):
        pass
    assert list((tmp_path / "new").iterdir()) == []
