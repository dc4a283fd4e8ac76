"""Derives a chat format from a chat template, by comparing renderings of placeholder conversations.

The text between two placeholders is cut where one turn ends and the next begins:

    first | user | U | end user  answer | A | end answer  user | U | end

Only a template that cannot render a single question is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from choreo_agents.models.chat.calling import tools_of
from choreo_agents.models.chat.format import NAME, ChatFormat, TurnFormat
from choreo_agents.models.chat.template import Template, Turn
from choreo_agents.models.chat.thinking import thoughts_of
from choreo_agents.models.chat.whole import WholeConversation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

_SEPARATOR = "\n\n"


def chat_format(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> ChatFormat:
    """Derive the chat format of a tokenizer's template; without one, turns are lines `Role: text`.

    Args:
        tokenizer: The model's tokenizer.
        options: See `Template`.

    Raises:
        ChatTemplateError: The template cannot render a conversation of one question.
        InvalidRequestError: An option cannot be one.
    """
    template = Template(tokenizer, options)
    if tokenizer.chat_template is None:
        system, user, assistant = (TurnFormat(f"{role}: ", None, "\n") for role in ("System", "User", "Assistant"))
        return ChatFormat(template.bos, system, user, assistant, later=system)
    return _TemplateAnalysis(template).format()


def mark_turn(role: str, number: int = 0, **more: str) -> Turn:
    """Return a turn whose content is a placeholder."""
    return {"role": role, "content": f"\u241f{role}{number}\u241f"} | more


class _TemplateAnalysis:
    """Derivation of the turns of one template."""

    def __init__(self, template: Template) -> None:
        self.template = template
        around = template.around
        alone = around([mark_turn("user")])
        if alone is None:
            raise template.make_error()
        self.before_first, self.shown_end = alone
        self.talk = around([mark_turn("user"), mark_turn("assistant"), mark_turn("user", 1)])
        self.last = around([mark_turn("user"), mark_turn("assistant")])
        self.lone = None if self.last is not None else around([mark_turn("assistant")])
        self.prompted = around([mark_turn("user")], answer=True)
        self.pair = around([mark_turn("user"), mark_turn("user", 1)])
        self._split_turns()

    def format(self) -> ChatFormat:
        """Return the chat format."""
        user, assistant = self._user(), self._assistant()
        answer = self._answer()
        if not (answer or "").strip() and not assistant.plain.strip():
            # An answer has no header: it then begins with what closes the question.
            close = user.after.lstrip()
            assistant = replace(assistant, plain=close + assistant.plain, named=None)
            answer, user = None, replace(user, after=user.after.removesuffix(close))
        first = self._first_user()
        bos, system, leads = self._system(first)
        default = first.removeprefix(bos)
        chat = ChatFormat(
            bos,
            system,
            user,
            assistant,
            later=self._later(first),
            answer=None if answer is None or answer.rstrip(" ") == assistant.plain.rstrip(" ") else answer,
            default_system=default,
            merges=_SEPARATOR if leads or not self.has_pairs else None,
            leads=leads,
        )
        chat = replace(chat, thoughts=thoughts_of(self.template, chat))
        usual = chat.thoughts is not None and chat.thoughts.usual
        tools = tools_of(self.template, chat)
        whole = WholeConversation(self.template, usual=usual, result=None if tools is None else tools.result)
        return replace(chat, tools=tools, whole=whole)

    def _split_turns(self) -> None:
        """Find the texts that open and close the user's turns, and close the assistant's."""
        common_start, common_end = self.template.common_start, self.template.common_end
        talk = self.talk
        opened = talk[1] if talk is not None else self.last[1] if self.last is not None else self._answer_opening()
        self.user_end = common_start(self.shown_end, opened)
        between = None if self.pair is None else self.pair[1]
        if between is not None and self.user_end.strip() == opened.strip():
            # The template opens an answer whether or not one is requested.
            self.user_end = between.removesuffix(common_end(between, self.before_first))
        self.assistant_open = opened.removeprefix(self.user_end)
        shown = "" if self.last is None else self.last[2]
        behind = talk[2] if talk is not None else None
        ends = [] if behind is None else [behind.removeprefix(common_start(shown, behind))]
        if between is not None:
            ends.insert(0, between.removeprefix(self.user_end))
        places = [self.before_first, *([] if behind is None else [behind])]
        fitting = [end for end in ends if end and all(place.endswith(end) for place in places)]
        fitting = fitting or [end for end in ends if end and places[-1].endswith(end)]
        guess = common_end(*places) if len(places) > 1 else self.before_first.removeprefix(self.template.bos)
        self.user_open = fitting[0] if fitting else guess
        self.has_pairs = between is not None and between == self.user_end + self.user_open
        self.assistant_end = shown if behind is None else behind.removesuffix(self.user_open)

    def _answer_opening(self) -> str:
        """Return the text that opens an answer, for a template that renders none after a question."""
        return self._final_end() if self.lone is None else self.shown_end + self.lone[0].removeprefix(self.template.bos)

    def _final_end(self) -> str:
        return self.shown_end if self.prompted is None else self.prompted[1]

    def _user(self) -> TurnFormat:
        named = self.template.around([mark_turn("user"), mark_turn("assistant"), mark_turn("user", 1, name=NAME)])
        opening = None if named is None else named[2].removeprefix(self.assistant_end)
        if opening is None and NAME in (alone := (self.template.around([mark_turn("user", name=NAME)]) or [""])[0]):
            opening = alone.removeprefix(self._first_user())
        return TurnFormat(self.user_open, _named_opening(opening), self.user_end, self._trims("user"))

    def _assistant(self) -> TurnFormat:
        more = [mark_turn("user", 1)] if self.talk is not None else []
        named = self.template.around([mark_turn("user"), mark_turn("assistant", name=NAME), *more])
        opening = None if named is None else named[1].removeprefix(self.user_end)
        return TurnFormat(self.assistant_open, _named_opening(opening), self.assistant_end, self._trims("assistant"))

    def _answer(self) -> str | None:
        """Return the header of the answer that the model is to write; None if the template adds none."""
        opening = self._final_end()
        if opening == self.shown_end and self.assistant_open.strip():
            return None
        return opening.removeprefix(self.user_end)

    def _first_user(self) -> str:
        """Return the text before the first user's turn if there are no instructions."""
        shared = self.template.common_end(self.before_first, self.user_open)
        return self.before_first.removesuffix(shared)

    def _system(self, first: str) -> tuple[str, TurnFormat, bool]:
        """Return the start of conversations, the turn of instructions, and whether that is part of the user's turn."""
        parts = self.template.around([mark_turn("system"), mark_turn("user")])
        if parts is None:
            return first, TurnFormat("", None, _SEPARATOR), True
        before, between, _ = parts
        bos = self._start(first, before)
        opening = before.removeprefix(bos)
        trims = self._trims("system")
        if between.endswith(self.user_open):
            named = self.template.around([mark_turn("system", name=NAME), mark_turn("user")])
            spoken = None if named is None else _named_opening(named[0].removeprefix(bos))
            return bos, TurnFormat(opening, spoken, between.removesuffix(self.user_open), trims), False
        return bos, TurnFormat(opening.removeprefix(self.user_open), None, between, trims), True

    def _start(self, first: str, before: str) -> str:
        """Return the common start of conversations with and without instructions."""
        common, bos = self.template.common_start(first, before), self.template.bos
        if common == first:
            return first
        return bos if bos and common.startswith(bos) and not self.user_open.startswith(bos) else ""

    def _later(self, first: str) -> TurnFormat | None:
        """Return the turn of instructions after other turns, if need be a developer's; None if there is neither."""
        talk = [mark_turn("user"), mark_turn("assistant"), mark_turn("system"), mark_turn("user", 1)]
        for first_said in ([], [mark_turn("system", 1)]):  # some templates move a lone one to the front
            parts = self.template.around([*first_said, *talk])
            form = None if parts is None else self._instructions(parts[-3].removeprefix(self.assistant_end), parts[-2])
            if form is not None:
                return form
        parts = self.template.around([mark_turn("developer"), mark_turn("user")])
        is_known = "developer" in str(self.template.tokenizer.chat_template)  # else it writes any role
        if parts is None or not is_known or not parts[0].startswith(first):
            return None
        return self._instructions(parts[0].removeprefix(first), parts[1])

    def _instructions(self, opening: str, behind: str) -> TurnFormat | None:
        """Return a turn of instructions with this text around its content; None if it is no turn of its own."""
        if not opening.strip() or not behind.endswith(self.user_open):
            return None
        return TurnFormat(opening, None, behind.removesuffix(self.user_open), self._trims("system"))

    def _trims(self, role: str) -> bool:
        """Return whether the template strips blanks around the messages of a role."""
        around = {"user": ["user"], "assistant": ["user", "assistant"], "system": ["system", "user"]}
        turns = [mark_turn(name) for name in around[role]]
        spaced = [turn | {"content": f" {turn['content']} "} if turn["role"] == role else turn for turn in turns]
        bare = self.template.render(turns)
        return bare is not None and self.template.render(spaced) == bare


def _named_opening(opening: str | None) -> str | None:
    """Return the opening of a named turn if it contains the name, else None."""
    return opening if opening is not None and NAME in opening else None
