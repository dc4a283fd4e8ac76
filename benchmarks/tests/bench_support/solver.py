"""What is right in a problem of the language, worked out slowly from the words that are given.

It reads neither golds nor scorers, and of the messages to be said only their names, authors and parents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partialmethod
from itertools import chain

from choreo_bench.language.problem import Problem

Said = Mapping[str, str]
UNKNOWN = "I do not know."
ANSWERS_BY_QUESTION = {
    r"What does (\w+) have\?": r"\b{} has \d+ \w+ \w+\.",
    r"What does (\w+) visit\?": r"\b{} visits \w+\.",
    r"What does (\w+) like\?": r"\b{} likes \w+\.",
    r"Who is the friend of (\w+)\?": r"\bThe friend of {} is \w+\.",
}
PLANS_BY_STRATEGY = {
    "Always cooperate.": {"I plan to cooperate."},
    "Always defect.": {"I plan to defect."},
    "Do what the other says.": {"I plan to follow the other."},
    "Do the opposite of what the other says.": {"I plan to do the opposite."},
    "Do what you like.": {"I plan to cooperate.", "I plan to defect."},
}


@dataclass(frozen=True)
class Solution:
    """Tells whether what counts is right, whether steps on the way are right too, and whether a gold is right."""

    right: Callable[[Said], bool]
    faultless: Callable[[Said], bool]
    agrees: Callable[[str, Said], bool]


def solve(problem: Problem) -> Solution:
    """Work out what is right in a problem."""
    return getattr(Solver(problem), problem.task)()


def sentences(text: str) -> list[str]:
    """The sentences of a text; the last may lack its full stop."""
    return [part.strip() for part in re.findall(r"[^.]*\.|[^.]+$", text) if part.strip()]


def first(text: str) -> str:
    """The first sentence of a text."""
    return (sentences(text) or [""])[0]


def last(text: str) -> str:
    """The last sentence of a text."""
    return (sentences(text) or [""])[-1]


def items(text: str) -> list[str]:
    """The words of `kites, boats and drums`."""
    return re.split(r", | and ", text)


def answer(question: str, texts: Iterable[str]) -> str:
    """The one sentence of the texts that answers a question; `I do not know.` if none does."""
    [(asked, form)] = [(m[1], form) for q, form in ANSWERS_BY_QUESTION.items() if (m := re.fullmatch(q, question))]
    found = {sentence for text in texts for sentence in re.findall(form.format(asked), text)}
    assert len(found) < 2, f"{question} has several answers: {found}"
    return found.pop() if found else UNKNOWN


def leaders(voices: Iterable[str]) -> list[str]:
    """The answers that most voices gave, in the order heard; `I do not know.` if nobody knows one."""
    known = [voice for voice in voices if voice != UNKNOWN]
    most = max(map(known.count, known), default=0)
    return list(dict.fromkeys(voice for voice in known if known.count(voice) == most)) or [UNKNOWN]


def after_hearing(own: str, heard: list[str]) -> str:
    """What an agent that has answered says when it has heard the others."""
    choice = leaders([own, *heard])[0]
    if choice == UNKNOWN:
        return choice
    if choice != own:
        return f"{choice} I change my answer."
    return f"{choice} We all agree." if set(heard) == {own} else f"{choice} I keep my answer."


def worked_out(question: str) -> str:
    """The steps of `Start at 6. Add 7.` in sentences, and the result."""
    value, steps = int(re.findall(r"Start at (\d+)\.", question)[0]), []
    for move, number in re.findall(r"(Add|Take) (\d+)\.", question):
        made = value + int(number) if move == "Add" else value - int(number)
        steps.append(f"{value} {'plus' if move == 'Add' else 'minus'} {number} is {made}.")
        value = made
    return " ".join([*steps, f"The result is {value}."])


def checked(question: str, solution: str) -> str:
    """A solution's steps worked out again up to the first wrong one, and the verdict on the result."""
    value, said = int(re.findall(r"Start at (\d+)\.", question)[0]), []
    assert re.findall(r"plus \d+|minus \d+", solution) == re.findall(r"plus \d+|minus \d+", worked_out(question))
    for left, change, made in re.findall(r"(\d+) (\w+ \d+) is (\d+)\.", solution):
        assert int(left) == value, "a solution goes on from what it made"
        should = value + int(change.replace("plus ", "").replace("minus ", "-"))
        if should != int(made):
            return " ".join([*said, f"{left} {change} is {should}, not {made}. The result is wrong."])
        said.append(f"{left} {change} is {should}, right.")
        value = should
    assert last(solution) == f"The result is {value}.", "a result is what the last step made"
    return " ".join([*said, "The result is right."])


def declared(words: str) -> str | None:
    """`cooperate` or `defect`, if somebody's first sentence says so."""
    return next(iter(re.findall(r"^I (?:will )?(cooperate|defect)\.$", first(words))), None)


def decision(strategy: str, heard: str) -> str | None:
    """What a strategy makes of the other's last words; None where it leaves that open."""
    told = declared(heard)
    opposite = {"cooperate": "defect", "defect": "cooperate"}.get(told or "")
    made = {"Always cooperate.": "cooperate", "Always defect.": "defect", "Do what the other says.": told}
    return opposite if strategy.startswith("Do the opposite") else made.get(strategy)


class Solver:
    """Solves one problem: a method for each task."""

    def __init__(self, problem: Problem) -> None:
        self.task, self.messages = problem.task, problem.by_name
        self.to_say = [message.name for message in problem.messages if message.is_answer]
        self.end = self.to_say[-1]
        view = [self.messages[name] for name in self.messages[self.end].parents]
        self.voices = {str(m.author): m.text for m in view if m.role == "assistant" and not m.is_answer}
        """What the last speaker is given to hear, by who said it; of each the last words."""

    def begun(self, beginning: str) -> list[str]:
        """The messages to be said whose names begin so."""
        return [name for name in self.to_say if name.startswith(beginning)]

    def given(self, name: str, *roles: str) -> list[str]:
        """The given texts that the author of a message sees, of some roles or of all."""
        parents = [self.messages[parent] for parent in self.messages[name].parents]
        return [parent.text for parent in parents if not parent.is_answer and (not roles or parent.role in roles)]

    def heard(self, name: str, *, own: bool) -> list[str]:
        """The messages to be said that the author of a message sees, its own or those of others."""
        author, parents = self.messages[name].author, self.messages[name].parents
        return [seen for seen in parents if seen in self.to_say and own == (self.messages[seen].author == author)]

    def each(self, counts: Callable[[str], str], wanted: Said, shown: Said | None = None) -> Solution:
        """Of each message the part that counts has one right wording."""
        return Solution(
            right=lambda said: all(counts(said[name]) == words for name, words in wanted.items()),
            faultless=lambda said: said == (wanted if shown is None else shown),
            agrees=lambda gold, _: gold == " ".join(wanted.values()),
        )

    def one(self, counts: Callable[[str], str], wanted: str, shown: str | None = None) -> Solution:
        """As `each`, where one message is to be said."""
        return self.each(counts, {self.end: wanted}, {self.end: wanted if shown is None else shown})

    def judged(self, is_right: Callable[[str], object]) -> Solution:
        """One message is to be said, and there are several right wordings."""
        return Solution(*[lambda said: bool(is_right(said[self.end]))] * 2, lambda gold, _: bool(is_right(gold)))

    def recall(self, counts: Callable[[str], str] = str.strip) -> Solution:
        """Each answer is to the question seen last, and needs to be exact."""
        views = {name: self.given(name) for name in self.to_say}
        return self.each(counts, {name: answer(view[-1], view[:-1]) for name, view in views.items()})

    multi_document = partialmethod(recall, first)

    def two_questions(self) -> Solution:
        """One reply answers all questions, faultless in their order, right in any."""
        people = re.findall(r"(?:What does|And) (\w+)(?: have)?\?", " ".join(self.given(self.end, "user")))
        wanted = [answer(f"What does {person} have?", self.given(self.end, "system")) for person in people]
        assert len(set(people)) == len(people), "somebody is asked about twice"
        any_order = self.judged(lambda words: sorted(sentences(words)) == sorted(wanted))
        return replace(any_order, faultless=lambda said: said == {self.end: " ".join(wanted)})

    three_questions = two_questions

    def branch_solve_merge(self) -> Solution:
        """The merged text covers every thing with sentences that branches wrote."""
        [(concepts, size)] = re.findall(r"^Write about (.*) in parts of (\d+)\.$", self.messages["problem"].text)
        wanted = re.findall(r"(\w+) with (\w+ \w+)", concepts)
        assert len(wanted) == concepts.count("with") == int(size) * len(self.begun("branch "))

        def covers(merged: str, said: Said) -> bool:
            offered = {sentence for branch in self.begun("branch ") for sentence in sentences(said[branch])}
            told = {*sentences(merged)}
            return told <= offered and told >= {f"{person} has {thing}." for person, thing in wanted}

        def faultless(said: Said) -> bool:
            branches = [said[branch] for branch in self.begun("branch ")]
            parts = [branch.split()[-1] for branch in self.begun("branch ")]
            shares = re.findall(r"Part \d+: ([\w, ]+)\.", said["plan"])
            planned = [re.findall(r"(\w+) with (\w+ \w+)", share) for share in shares]
            told = [re.findall(r"(\w+) has (\w+ \w+)\.", words) for words in branches]
            asked = [self.given(branch, "user")[-1] for branch in self.begun("branch ")]
            assert asked == [f"Write part {part}." for part in parts]
            as_planned = told == planned == [wanted[at : at + int(size)] for at in range(0, len(wanted), int(size))]
            return as_planned and said["merged"] == " ".join(branches)

        return Solution(lambda said: covers(said["merged"], said), faultless, covers)

    def majority_vote(self) -> Solution:
        """What most say is right."""
        [best] = leaders(self.voices.values())
        return self.one(first, best)

    def best_supported(self) -> Solution:
        """The answer with the largest number before it is right."""
        notes = {words: int(re.findall(r"^Support (\d+): \d+ \w+ \w+\.$", words)[0]) for words in self.voices.values()}
        [best] = [words for words, number in notes.items() if number == max(notes.values())]
        return self.one(first, best)

    def list_union(self) -> Solution:
        """Every thing that somebody sees is listed once, in whatever order."""
        lists = [items(words.removeprefix("I see ").removesuffix(".")) for words in self.voices.values()]
        form, things = re.compile(r"\s*We see ([\w, ]+)\.\s*"), sorted({*chain(*lists)})
        return self.judged(lambda words: (found := form.fullmatch(words)) and sorted(items(found[1])) == things)

    def sum_of_parts(self) -> Solution:
        """The numbers are summed up one after the other."""
        parts = [re.findall(r"^I have (\d+) (\w+)\.$", words)[0] for words in self.voices.values()]
        [thing] = {thing for _, thing in parts}
        numbers = [int(number) for number, _ in parts]
        sums = [sum(numbers[: end + 1]) for end in range(len(numbers))]
        steps = [f"{a} and {b} make {c}." for a, b, c in zip(sums, numbers[1:], sums[1:], strict=False)]
        total = f"We have {sums[-1]} {thing}."
        return self.one(last, total, " ".join([*steps, total]))

    def two_hop(self) -> Solution:
        """Each question asks what somebody's friend has."""
        wanted, shown = {}, {}
        for name in self.to_say:
            *notes, question = self.given(name)
            person = re.findall(r"^What does the friend of (\w+) have\?$", question)[0]
            friend = answer(f"Who is the friend of {person}?", notes)
            wanted[name] = answer(f"What does {friend.split()[-1].rstrip('.')} have?", notes)
            shown[name] = f"{friend} {wanted[name]}"
        return self.each(last, wanted, shown)

    def conflict(self) -> Solution:
        """Who has most points is right."""
        [trust] = self.given(self.end, "system")
        points = {agent: int(number) for number, agent in re.findall(r"(\d+) points for (\w+)\.", trust)}
        [best] = [agent for agent, number in points.items() if number == max(points.values())]
        assert points.keys() == self.voices.keys()
        return self.one(first, f"{points[best]} points for {best}: {self.voices[best]}")

    def diagnosis(self) -> Solution:
        """The one rule whose two conditions were last reported names what is broken."""
        [handbook] = self.given(self.end, "system")
        rules = re.findall(r"((\w+) and (\w+): \w+ broken\.)", handbook)
        assert len(rules) == handbook.count(".")
        wanted = {}
        for name in self.to_say:
            reports = [re.findall(r"^([A-Z]\w+): (\w+)\.$", words)[0] for words in self.given(name, "assistant")]
            shown = set(dict(reports).values())
            [rule] = [rule for rule, one, other in rules if one in shown and other in shown]
            wanted[name] = f"We see {rule}"
        return self.each(last, wanted)

    def trajectories(self) -> Solution:
        """A thing is in the box where its branch found it, or in none."""
        answers = {}
        for name in self.to_say:
            asked = re.findall(r"^Where are the (\w+)\?$", self.given(name)[-1])[0]
            heard = self.given(name, "assistant")
            [box] = [box for text in heard for box in re.findall(rf"Find {asked}: (\d+|none)\.", text)]
            answers[name] = f"The {asked}: {box}."
        return self.each(first, answers)

    def summary(self) -> Solution:
        """What the trajectory found, in its order."""
        [trajectory] = self.voices.values()
        return self.one(str.strip, " ".join(re.findall(r"Find \w+: \d+\.", trajectory)) or "Find none.")

    def arithmetic(self) -> Solution:
        """The last sentence states the result."""
        solution = worked_out(self.messages["problem"].text)
        return self.one(last, last(solution), solution)

    def check(self) -> Solution:
        """The solution is checked to its end, or to its first wrong step."""
        [solution] = self.voices.values()
        return self.one(str.strip, checked(self.messages["problem"].text, solution))

    def choose_by_value(self) -> Solution:
        """The vote is for the right result, or for anybody who has it."""
        solution = worked_out(self.messages["problem"].text)
        result = last(solution)
        authors = [author for author, words in self.voices.items() if last(words) == result]
        assert authors
        named = authors if self.task == "choose_by_index" else [result.split()[-1].rstrip(".")]
        votes = [f"I vote for {name}." for name in named]
        steps = solution.removesuffix(result)
        any_of_them = self.judged(lambda words: last(words) in votes)
        return replace(any_of_them, faultless=lambda said: said[self.end] in [steps + vote for vote in votes])

    choose_by_index = choose_by_value

    def moderated_debate(self) -> Solution:
        """The first result that the moderator names is right; a faultless debate says the same in every round."""
        question = self.messages["problem"].text
        solution = worked_out(question)
        words = {"affirmative": solution, "negative": checked(question, solution), "moderator": last(solution)}

        def right(said: Said) -> bool:
            verdicts = [last(said[name]) for name in self.begun("moderator ")]
            return [verdict for verdict in verdicts if verdict != "Go on."][:1] == [last(solution)]

        def faultless(said: Said) -> bool:
            return all(text == words[name.split()[0]] for name, text in said.items())

        return Solution(right, faultless, lambda gold, _: gold == last(solution))

    def debate(self) -> Solution:
        """The truth is what most notes say; most agents are to end with it."""
        ends = {str(self.messages[name].author): name for name in self.to_say}
        [question] = self.given(self.end, "user")
        held = {agent: answer(question, self.given(name, "system")) for agent, name in ends.items()}
        [truth] = leaders(held.values())
        assert list(held.values()).count(truth) > len(held) / 2

        def expected(name: str, said: Said) -> str:
            own, others = ([first(said[m]) for m in self.heard(name, own=mine)] for mine in (True, False))
            return after_hearing(own[-1], others) if own else held[str(self.messages[name].author)]

        return Solution(
            right=lambda said: leaders(first(said[name]) for name in ends.values()) == [truth],
            faultless=lambda said: all(said[name] == expected(name, said) for name in self.to_say),
            agrees=lambda gold, _: gold == truth,
        )

    def debate_turn(self) -> Solution:
        """One's own last answer, or else one's notes, count as one voice among those heard."""
        me = str(self.messages[self.end].author)
        [question] = self.given(self.end, "user")
        mine = answer(question, self.given(self.end, "system"))
        own = first(self.voices.get(me, mine))
        heard = [first(words) for author, words in self.voices.items() if author != me]
        if self.to_say == [self.end]:
            return self.one(str.strip, leaders([mine, *heard])[0])
        words = after_hearing(own, heard)
        return replace(self.each(str.strip, {f"{me} 1": mine, self.end: words}), agrees=lambda gold, _: gold == words)

    def prisoners_dilemma(self) -> Solution:
        """Each decision follows from a strategy and the other's last words."""
        decisions, plans = self.begun("decision "), self.begun("plan ")
        strategy = {name: self.given(name, "system")[-1] for name in self.to_say}

        def right(said: Said) -> bool:
            made = {name: declared(said[name]) for name in decisions}
            wanted = {name: decision(strategy[name], said[self.heard(name, own=False)[-1]]) for name in decisions}
            return all(made[name] is not None and wanted[name] in (None, made[name]) for name in decisions)

        def faultless(said: Said) -> bool:
            fits = all(said[name] in PLANS_BY_STRATEGY[strategy[name]] for name in plans)
            return fits and all(declared(said[name]) for name in said.keys() - set(plans)) and right(said)

        return Solution(right, faultless, lambda gold, said: right(said) and gold == " ".join(map(said.get, decisions)))
