"""Training text of problems: the turns that the model sees, and those that it learns to say."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from transformers import PreTrainedTokenizerFast

from choreo_bench.embedded.recipe import TrainingRecipe
from choreo_bench.language import TASKS, Problem, Task, draw_problem, vocabulary
from choreo_bench.language.tasks.recall import MultiDocument

IGNORED = -100


@dataclass(frozen=True)
class TranscriptTurn:
    """A message of a transcript; the model learns the text of `learn` turns only."""

    name: str
    role: str
    text: str
    author: str | None = None
    learn: bool = False


Transcript = list[TranscriptTurn]
Encoded = tuple[list[int], list[int]]
"""Token ids and labels of one transcript."""


def transcripts(problem: Problem) -> list[Transcript]:
    """Ordinary prompts of everything that is to be said: each message once, those that continue a prompt in one."""
    made: list[Transcript] = []
    for message in problem.messages:
        if not message.is_answer:
            continue
        last = TranscriptTurn(message.name, message.role, message.text, message.author, learn=True)
        view = [_given(problem, parent) for parent in message.parents]
        names = [turn.name for turn in view]
        for transcript in made:
            if [turn.name for turn in transcript] == names[: len(transcript)]:
                transcript += [*view[len(transcript) :], last]
                break
        else:
            made.append([*view, last])
    return made


def varied(rng: random.Random, transcript: Transcript) -> Transcript:
    """Change what should not matter: the rules, names, and whether notes stand before or after what is asked."""
    turns = [turn for turn in transcript if turn.name != "rules" or rng.random() < 0.7]
    if rng.random() < 0.5:
        turns = _notes_last(turns)
    if rng.random() < 0.08:
        turns = _renamed(rng, turns)
    learnt = [turn for turn in turns if turn.learn]
    if len(learnt) == 1 and rng.random() < 0.25:
        turns = [replace(turn, author=None) if turn.learn else turn for turn in turns]
    return turns


def draw_transcripts(recipe: TrainingRecipe, bucket: int) -> list[Transcript]:
    """The transcripts of a bucket: enough for its batches, give or take a problem."""
    rng = random.Random(f"train {recipe.seed} {bucket}")
    phase, hardness = recipe.phase(bucket), recipe.hardness(bucket)
    wanted, words = phase.batch_tokens * phase.batches, 0
    drawn: list[Transcript] = []
    while words < wanted:
        made = draw_made(rng, phase.mix, hardness)
        drawn += made
        words += sum(_length(transcript) for transcript in made)
    return drawn


def draw_made(rng: random.Random, mix: Mapping[str, float], hardness: float) -> list[Transcript]:
    """The transcripts of one problem, or one of a warm-up.

    Args:
        rng: Decides.
        mix: The share of each task, warm-up and practice among what is drawn.
        hardness: Of the problem, 0 to 1.
    """
    [name] = rng.choices(list(mix), list(mix.values()))
    if name in WARM_UPS:
        return [WARM_UPS[name](rng)]
    task = PRACTICE[name](rng) if name in PRACTICE else TASKS[name].varied(rng, hardness)
    problem = draw_problem(task, "train", rng.getrandbits(48))
    return [varied(rng, transcript) for transcript in transcripts(problem)]


def induction(rng: random.Random) -> Transcript:
    """Random words with repeated segments: the warm-up without which recall stays at chance."""
    words = rng.choices(vocabulary.words(), k=rng.randint(4, 13))
    repeats: list[str] = []
    for _ in range(rng.randint(2, 4)):
        start = rng.randrange(len(words) - 2)
        repeats.extend(words[start : start + rng.randint(3, len(words))])
    return [
        TranscriptTurn("words", "user", " ".join(words)),
        TranscriptTurn("repeats", "assistant", " ".join(repeats), learn=True),
    ]


def confusion(rng: random.Random) -> Transcript:
    """Repeated segments of few different words: the word before does not tell what comes next, so look further back.

    A model that only learnt `induction` goes on with another person's fact after a number that two people share.
    """
    pool = vocabulary.words() if rng.random() < 0.3 else rng.sample(vocabulary.words(), rng.randint(4, 12))
    words = rng.choices(pool, k=rng.randint(8, 24))
    repeats: list[str] = []
    for _ in range(rng.randint(2, 4)):
        length = rng.randint(5, len(words))
        start = rng.randrange(len(words) - length + 1)
        repeats.extend(words[start : start + length])
    return [
        TranscriptTurn("words", "user", " ".join(words)),
        TranscriptTurn("repeats", "assistant", " ".join(repeats), learn=True),
    ]


def sums(rng: random.Random) -> Transcript:
    """Small sums, several at once: what step-by-step arithmetic is made of."""
    questions, worked = [], []
    for _ in range(rng.randint(2, 8)):
        one, other = rng.randint(1, 20), rng.randint(1, 9)
        sign = rng.choice(("plus", "minus", "and")) if one >= other else "plus"
        made = one - other if sign == "minus" else one + other
        questions.append(f"{one} {sign} {other}")
        worked.append(f"{one} {sign} {other} {'make' if sign == 'and' else 'is'} {made}.")
    return [
        TranscriptTurn("sums", "user", f"{', '.join(questions)}?"),
        TranscriptTurn("results", "assistant", " ".join(worked), learn=True),
    ]


def orders(rng: random.Random) -> Transcript:
    """Lists of things, each said again in alphabetical order and without repetitions."""
    turns: Transcript = []
    for number in range(rng.randint(1, 4)):
        kinds = rng.sample(vocabulary.OBJECTS, rng.randint(2, 10))
        listed = rng.choices(kinds, k=rng.randint(2, 10))
        turns.append(TranscriptTurn(f"list {number}", "user", f"{', '.join(listed)} in order?"))
        turns.append(TranscriptTurn(f"order {number}", "assistant", f"{', '.join(sorted(set(listed)))}.", learn=True))
    return turns


def largest(rng: random.Random) -> Transcript:
    """Lists of different numbers, and the largest of each."""
    turns: Transcript = []
    for number in range(rng.randint(1, 6)):
        numbers = rng.sample(range(2, 21), rng.randint(2, 6))
        turns.append(TranscriptTurn(f"numbers {number}", "user", f"{', '.join(map(str, numbers))}: which is most?"))
        turns.append(TranscriptTurn(f"most {number}", "assistant", f"{max(numbers)}.", learn=True))
    return turns


def rules(rng: random.Random) -> Transcript:
    """Rules that are found by two words at once, as in `diagnosis`, and many of them looked up.

    Few gauges make rules that share a word: whoever looks for one of the two finds the wrong rule.
    """
    gauges = rng.sample(list(vocabulary.GAUGES), rng.choice((2, 3, 3, 4, 5)))
    conditions = [
        f"{a} and {b}"
        for one, other in combinations(gauges, 2)
        for a, b in product(vocabulary.GAUGES[one], vocabulary.GAUGES[other])
    ]
    known = rng.sample(conditions, rng.randint(2, min(7, len(conditions))))
    sentences = [
        f"{condition}: {part} broken."
        for condition, part in zip(known, rng.sample(vocabulary.PARTS, len(known)), strict=True)
    ]
    indices = rng.choices(range(len(sentences)), k=rng.randint(3, 8))
    seen = ", ".join(known[index] for index in indices)
    answers = " ".join(sentences[index] for index in indices)
    return [
        TranscriptTurn("rules", "system", f"Rules: {' '.join(sentences)}"),
        TranscriptTurn("seen", "user", f"{seen}?"),
        TranscriptTurn("answers", "assistant", answers, learn=True),
    ]


WARM_UPS: Mapping[str, Callable[[random.Random], Transcript]] = {
    "induction": induction,
    "confusion": confusion,
    "sums": sums,
    "orders": orders,
    "largest": largest,
    "rules": rules,
}
"""What is learnt before, and beside, the tasks: by name, as phases name them."""


def reports(rng: random.Random) -> MultiDocument:
    """Many questions about long reports: of a single one, hardly anything is to be learnt."""
    facts, questions = rng.randint(4, 11), rng.randint(4, 12)
    return MultiDocument(fewest=1, most=16, facts=facts, questions=questions, unknown=0.1)


PRACTICE: Mapping[str, Callable[[random.Random], Task]] = {"reports": reports}
"""Tasks with knobs that their own training does not turn: by name, as phases name them."""


def encode(tokenizer: PreTrainedTokenizerFast, transcripts: Sequence[Transcript]) -> list[Encoded]:
    """Token ids of transcripts, and the same with every token ignored that is not to be learnt.

    Each is what the chat template makes of it; all texts go through the tokenizer in one call, which is faster.
    """
    turns = [turn for transcript in transcripts for turn in transcript]
    texts = [f" {turn.author}:" if turn.author else "" for turn in turns] + [f" {turn.text}" for turn in turns]
    encoded = [e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    headers, words = iter(encoded[: len(turns)]), iter(encoded[len(turns) :])
    role_ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in vocabulary.ROLES}
    made: list[Encoded] = []
    for transcript in transcripts:
        ids, labels = [tokenizer.bos_token_id], [IGNORED]
        for turn in transcript:
            header, text = [role_ids[turn.role], *next(headers)], [*next(words), tokenizer.eos_token_id]
            ids += header + text
            labels += [IGNORED] * len(header) + (text if turn.learn else [IGNORED] * len(text))
        made.append((ids, labels))
    return made


def _given(problem: Problem, name: str) -> TranscriptTurn:
    message = problem.by_name[name]
    return TranscriptTurn(name, message.role, message.text, message.author)


def _length(transcript: Transcript) -> int:
    """About how many tokens a transcript has, cheaply: words, punctuation, headers."""
    return sum(turn.text.count(" ") + turn.text.count(".") + 5 for turn in transcript)


def _notes_last(turns: Transcript) -> Transcript:
    """The leading notes moved behind the questions that follow them."""
    notes = [index for index, turn in enumerate(turns) if turn.name.startswith("notes")]
    if not notes or notes != list(range(notes[0], notes[-1] + 1)):
        return turns
    end = notes[-1] + 1
    while end < len(turns) and turns[end].role == "user":
        end += 1
    return [*turns[: notes[0]], *turns[notes[-1] + 1 : end], *turns[notes[0] : notes[-1] + 1], *turns[end:]]


def _renamed(rng: random.Random, turns: Transcript) -> Transcript:
    """Speakers with names that only bytes can spell, unless somebody is spoken of."""
    authors = list(dict.fromkeys(turn.author for turn in turns if turn.author))
    if any(author in turn.text for turn in turns for author in authors):
        return turns
    letters = "abcdefghijklmnopqrstuvwxyz_"
    names = {author: "".join(rng.choices(letters, k=rng.randint(3, 8))) for author in authors}
    return [replace(turn, author=names[turn.author]) if turn.author else turn for turn in turns]
