"""The embedded tokenizer on any text, debate problems of any seed, and what a transcript teaches."""

from random import Random

from choreo_bench.embedded.tokenizer import build_tokenizer
from choreo_bench.embedded.transcripts import IGNORED, WARM_UPS, Transcript, encode, transcripts, varied
from choreo_bench.language import TASKS, draw_problem, vocabulary
from choreo_bench.language.scoring import first_sentence
from choreo_bench.language.sentences import plurality, revise
from choreo_bench.language.tasks.debate import debate_problem
from hypothesis import example, given
from hypothesis import strategies as st

from choreo_agents.models.chat.template_analysis import chat_format

TOKENIZER = build_tokenizer()
CHAT = chat_format(TOKENIZER)
words = st.sampled_from([*vocabulary.words(), *vocabulary.PUNCTUATION, *vocabulary.SPECIAL_TOKENS, " ", "\n", "  "])
texts = st.lists(words | st.text(max_size=8), max_size=8).map("".join)
problems = st.tuples(st.integers(0, 10**9), st.integers(2, 8), st.integers(1, 20))


@given(texts)
@example("\r\n\t\x00\x1c\x85\u00a0\u2028\u3000 ")
@example("naïve Ünï🦜👩‍👩‍👧 e\u0301 9\u0663 -_<|end|>")
def test_any_text_is_encoded_and_decoded_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text
    assert all(0 <= token < len(TOKENIZER) for token in ids)


@given(
    st.lists(
        st.tuples(st.sampled_from(vocabulary.ROLES), texts, st.none() | st.text(min_size=1, max_size=6)),
        min_size=1,
        max_size=5,
    )
)
def test_the_chat_template_is_the_turns_joined(turns) -> None:
    messages = [{"role": role, "content": words} | ({"name": name} if name else {}) for role, words, name in turns]
    joined = CHAT.root(None).text + "".join(CHAT.turn(role, words, name).text for role, words, name in turns)
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == joined


@given(st.none() | st.sampled_from(vocabulary.AGENTS), st.sampled_from(vocabulary.words()))
def test_a_header_is_the_beginning_of_the_tokens_of_its_turn(name: str | None, word: str) -> None:
    """So that what a decode starts with is what a prefilled turn starts with."""
    header = TOKENIZER.encode(CHAT.header(name).text, add_special_tokens=False)
    turn = TOKENIZER.encode(CHAT.turn("assistant", word, name).text, add_special_tokens=False)
    assert turn[: len(header)] == header and len(turn) == len(header) + 2


@given(problems, st.data())
def test_exactly_the_mistaken_notes_are_wrong_and_only_about_the_number_asked_for(problem, data) -> None:
    seed, agents, facts = problem
    wrong = data.draw(st.none() | st.integers(0, agents - 1))
    made = debate_problem(seed, agents=agents, facts=facts, wrong=wrong)
    sentences = [sorted(notes.removeprefix("Notes: ").removesuffix(".").split(". ")) for notes in made.notes]
    truth = made.answer.removesuffix(".")
    right = next((held for held in sentences if truth in held), None)
    assert right is not None and made.agents == vocabulary.AGENTS[:agents] and len(sentences) == agents
    assert made.question == f"What does {truth.split()[0]} have?"
    mistaken = [held for held in sentences if truth not in held]
    assert len(mistaken) == ((agents - 1) // 2 if wrong is None else wrong)
    for held in sentences:
        assert len(held) == facts
        changed = [(old, new) for old, new in zip(right, held, strict=True) if old != new]
        assert len(changed) == (held in mistaken)
        for old, new in changed:
            assert old == truth and old.split()[2] != new.split()[2] and old.split()[3:] == new.split()[3:]


@given(problems)
def test_agents_that_hear_each_other_agree_on_the_truth(problem) -> None:
    seed, agents, facts = problem
    made = debate_problem(seed, agents=agents, facts=facts)
    person = made.answer.split()[0]
    answers = [
        next(s for s in notes.split(": ")[1].split(".") if s.split()[0] == person).strip() + "." for notes in made.notes
    ]
    assert answers.count(made.answer) > agents / 2
    assert plurality(None, answers) == made.answer
    for i, own in enumerate(answers):
        said = revise(own, answers[:i] + answers[i + 1 :])
        assert first_sentence(said) == made.answer


@st.composite
def drawn(draw: st.DrawFn) -> Transcript:
    """A training transcript of any task."""
    rng = Random(draw(st.integers(0, 10**9)))
    name = draw(st.sampled_from([*WARM_UPS, *sorted(TASKS)]))
    if name in WARM_UPS:
        return WARM_UPS[name](rng)
    task = TASKS[name].varied(rng, draw(st.floats(0.0, 1.0)))
    return varied(rng, rng.choice(transcripts(draw_problem(task, "train", rng.getrandbits(32)))))


@given(drawn())
def test_a_transcript_is_encoded_as_the_template_writes_it_and_learnt_words_are_labelled(turns) -> None:
    [(ids, labels)] = encode(TOKENIZER, [turns])
    messages = [{"role": turn.role, "content": turn.text, "name": turn.author} for turn in turns]
    assert TOKENIZER.decode(ids) == TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert ids == TOKENIZER.encode(TOKENIZER.decode(ids), add_special_tokens=False)
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    learnt = TOKENIZER.decode([label for label in labels if label != IGNORED])
    assert learnt == "".join(f" {turn.text}<|end|>" for turn in turns if turn.learn)
    assert learnt, "nothing to learn"


@given(drawn())
def test_what_is_learnt_follows_its_header_and_nothing_else_is_labelled(turns) -> None:
    """Turn by turn, so that a label one token off its words would be seen."""
    [(ids, labels)] = encode(TOKENIZER, [turns])
    at = 1
    assert labels[0] == IGNORED
    for turn in turns:
        header = len(TOKENIZER.encode(CHAT.turn(turn.role, "", turn.author).text.removesuffix(" <|end|>")))
        end = ids.index(TOKENIZER.eos_token_id, at) + 1
        assert labels[at : at + header] == [IGNORED] * header
        assert labels[at + header : end] == (ids[at + header : end] if turn.learn else [IGNORED] * (end - at - header))
        at = end
    assert at == len(ids)


@given(st.lists(drawn(), min_size=1, max_size=4))
def test_transcripts_encoded_together_are_those_encoded_alone(several) -> None:
    assert encode(TOKENIZER, several) == [encode(TOKENIZER, [turns])[0] for turns in several]
