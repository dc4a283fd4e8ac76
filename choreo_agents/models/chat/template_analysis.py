"""Takes a chat template apart: what it writes around each turn is the difference of what it writes of conversations.

A conversation of marks is rendered, and what stands between two marks is cut where a turn ends and the next begins:

    first | user | U | end user  answer | A | end answer  user | U | end

No template is refused for what it does with turns; only one that cannot write a single question is.
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
    """The format of a tokenizer's chat template; plain `Role: words` lines where it has none.

    Args:
        tokenizer: Of the model.
        options: See `Template`.

    Raises:
        ChatTemplateError: The template cannot write a conversation of one question.
        InvalidRequestError: An option cannot be one.
    """
    template = Template(tokenizer, options)
    if tokenizer.chat_template is None:
        system, user, assistant = (TurnFormat(f"{role}: ", None, "\n") for role in ("System", "User", "Assistant"))
        return ChatFormat(template.bos, system, user, assistant, later=system)
    return _Derivation(template).format()


def said(role: str, number: int = 0, **more: str) -> Turn:
    """A turn whose words are a mark."""
    return {"role": role, "content": f"\u241f{role}{number}\u241f"} | more


class _Derivation:
    """One template's turns."""

    def __init__(self, template: Template) -> None:
        self.template = template
        around = template.around
        alone = around([said("user")])
        if alone is None:
            raise template.failed()
        self.before_first, self.shown_end = alone
        self.talk = around([said("user"), said("assistant"), said("user", 1)])
        self.last = around([said("user"), said("assistant")])
        self.lone = None if self.last is not None else around([said("assistant")])
        self.asked = around([said("user")], answer=True)
        self.pair = around([said("user"), said("user", 1)])
        self._cut()

    def format(self) -> ChatFormat:
        """All of them."""
        user, assistant = self._user(), self._assistant()
        answer = self._answer()
        if not (answer or "").strip() and not assistant.plain.strip():
            # Nothing opens an answer but what closes the question before it: that is where it begins, then.
            close = user.after.lstrip()
            assistant = replace(assistant, plain=close + assistant.plain, named=None)
            answer, user = None, replace(user, after=user.after.removesuffix(close))
        first = self._first_user()
        bos, system, leads = self._system(first)
        default = first.removeprefix(bos)
        made = ChatFormat(
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
        made = replace(made, thoughts=thoughts_of(self.template, made))
        usual = made.thoughts is not None and made.thoughts.usual
        tools = tools_of(self.template, made)
        whole = WholeConversation(self.template, usual=usual, result=None if tools is None else tools.result)
        return replace(made, tools=tools, whole=whole)

    def _cut(self) -> None:
        """Find where the user's turns end and begin, and the assistant's end."""
        common_start, common_end = self.template.common_start, self.template.common_end
        talk = self.talk
        opened = talk[1] if talk is not None else self.last[1] if self.last is not None else self._opened_alone()
        self.user_end = common_start(self.shown_end, opened)
        between = None if self.pair is None else self.pair[1]
        if between is not None and self.user_end.strip() == opened.strip():
            # It opens an answer whether or not it is asked for one.
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

    def _opened_alone(self) -> str:
        """What opens an answer of a template that shows no question before it."""
        return self._asked_end() if self.lone is None else self.shown_end + self.lone[0].removeprefix(self.template.bos)

    def _asked_end(self) -> str:
        return self.shown_end if self.asked is None else self.asked[1]

    def _user(self) -> TurnFormat:
        named = self.template.around([said("user"), said("assistant"), said("user", 1, name=NAME)])
        opening = None if named is None else named[2].removeprefix(self.assistant_end)
        if opening is None and NAME in (alone := (self.template.around([said("user", name=NAME)]) or [""])[0]):
            opening = alone.removeprefix(self._first_user())
        return TurnFormat(self.user_open, _message_ids(opening), self.user_end, self._trims("user"))

    def _assistant(self) -> TurnFormat:
        more = [said("user", 1)] if self.talk is not None else []
        named = self.template.around([said("user"), said("assistant", name=NAME), *more])
        opening = None if named is None else named[1].removeprefix(self.user_end)
        return TurnFormat(self.assistant_open, _message_ids(opening), self.assistant_end, self._trims("assistant"))

    def _answer(self) -> str | None:
        """What the model speaks behind; None if the template does not say."""
        asked = self._asked_end()
        if asked == self.shown_end and self.assistant_open.strip():
            return None
        return asked.removeprefix(self.user_end)

    def _first_user(self) -> str:
        """What stands before the first user's turn where nobody gives instructions."""
        shared = self.template.common_end(self.before_first, self.user_open)
        return self.before_first.removesuffix(shared)

    def _system(self, first: str) -> tuple[str, TurnFormat, bool]:
        """What conversations start with, instructions that come first, and whether these stand in the user's turn."""
        found = self.template.around([said("system"), said("user")])
        if found is None:
            return first, TurnFormat("", None, _SEPARATOR), True
        before, between, _ = found
        bos = self._start(first, before)
        opening = before.removeprefix(bos)
        trims = self._trims("system")
        if between.endswith(self.user_open):
            named = self.template.around([said("system", name=NAME), said("user")])
            spoken = None if named is None else _message_ids(named[0].removeprefix(bos))
            return bos, TurnFormat(opening, spoken, between.removesuffix(self.user_open), trims), False
        return bos, TurnFormat(opening.removeprefix(self.user_open), None, between, trims), True

    def _start(self, first: str, before: str) -> str:
        """What conversations start with, whether or not somebody gives instructions."""
        common, bos = self.template.common_start(first, before), self.template.bos
        if common == first:
            return first
        return bos if bos and common.startswith(bos) and not self.user_open.startswith(bos) else ""

    def _later(self, first: str) -> TurnFormat | None:
        """Instructions that come after other turns: where the template has none of these, the family's developer's."""
        talk = [said("user"), said("assistant"), said("system"), said("user", 1)]
        for first_said in ([], [said("system", 1)]):  # some take the only instructions for the first, wherever given
            found = self.template.around([*first_said, *talk])
            form = None if found is None else self._instructions(found[-3].removeprefix(self.assistant_end), found[-2])
            if form is not None:
                return form
        found = self.template.around([said("developer"), said("user")])
        is_known = "developer" in str(self.template.tokenizer.chat_template)  # else it writes any role
        if found is None or not is_known or not found[0].startswith(first):
            return None
        return self._instructions(found[0].removeprefix(first), found[1])

    def _instructions(self, opening: str, behind: str) -> TurnFormat | None:
        """The form of a turn that stands between these, if it is one."""
        if not opening.strip() or not behind.endswith(self.user_open):
            return None
        return TurnFormat(opening, None, behind.removesuffix(self.user_open), self._trims("system"))

    def _trims(self, role: str) -> bool:
        """Whether the template leaves out blanks around somebody's words."""
        around = {"user": ["user"], "assistant": ["user", "assistant"], "system": ["system", "user"]}
        turns = [said(each) for each in around[role]]
        spaced = [turn | {"content": f" {turn['content']} "} if turn["role"] == role else turn for turn in turns]
        bare = self.template.render(turns)
        return bare is not None and self.template.render(spaced) == bare


def _message_ids(opening: str | None) -> str | None:
    """What opens a named turn, if the name stands in it once or oftener."""
    return opening if opening is not None and NAME in opening else None
