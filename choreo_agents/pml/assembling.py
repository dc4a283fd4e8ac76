"""Assembles prompts: cached pieces of the schema at their positions, and fresh text encoded for the prompt alone."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from choreo_agents.engine import Decode, Engine
from choreo_agents.engine.transfer import Leases
from choreo_agents.errors import InvalidRequestError
from choreo_agents.kv.handle import MessageHandle
from choreo_agents.models import ChatFormat, LoadedModel, PromptText
from choreo_agents.pml.compiler import CompiledSchema, ModuleSpan, SchemaPiece, SlotSpan, TextSpan, check_length
from choreo_agents.pml.markup.problems import Problems
from choreo_agents.pml.markup.syntax import Argument, ChatTurn, Import, Path, PromptTree, Role, Text
from choreo_agents.pml.schema import Prompt
from choreo_agents.sampling import Sampling

Kind = Literal["argument", "module", "text"]
"""Kind of fresh text: a parameter's argument, text of an uncached module, or the prompt's own text or turn."""


@dataclass(frozen=True)
class FreshText:
    """Tokens that are encoded for the prompt, in one prefill."""

    tokens: tuple[int, ...]
    offset: int
    role: Role | None
    """Role of a turn of the prompt."""
    kind: Kind
    module: Path
    """Path of the module; () for the schema's and the prompt's own text."""
    confidential: bool
    """Whether that module is confidential."""


@dataclass(frozen=True)
class Assembly:
    """A prompt as cached pieces of its schema and fresh tokens, without overlaps."""

    prompt: Prompt
    cached: tuple[SchemaPiece, ...]
    """Whole pieces at the positions where they were encoded, in order; without those of slots with an argument."""
    fresh: tuple[FreshText, ...]
    """In the order of positions and of encoding: each attends to the pieces and texts before it."""
    end: int
    """Position after all of them, where an answer starts."""
    open_end: int | None
    """If the template requires user and assistant to alternate, and the prompt ends with a user's turn: position of the
    closing of that turn, where more text of users can be merged into it. Else None."""
    cached_tokens: int
    fresh_tokens: int


def compile_prompt(compiled: CompiledSchema, prompt: Prompt, model: LoadedModel) -> Assembly:
    """Place a prompt's imports, arguments and own text (Prompt Cache, section 3.4).

    An argument is placed at the start of its slot. Text before an import is placed in the gap after the import that it
    follows, or after the schema's text before the first one, if it fits there. All other text, and turns, are placed at
    the end, in the order in which they are written.

    Raises:
        PMLError: An argument is longer than its slot, or the prompt longer than the model's context.
        InvalidRequestError: The prompt is of another schema.
    """
    if prompt.schema != compiled.schema.tree:
        raise InvalidRequestError(f"the prompt is of another version of schema {prompt.schema.name!r}")
    assembling = _Assembling(compiled, prompt, model)
    assembling.place_imports()
    assembling.place_texts()
    return assembling.finish()


class _Assembling:
    def __init__(self, compiled: CompiledSchema, prompt: Prompt, model: LoadedModel) -> None:
        self.compiled, self.prompt, self.model = compiled, prompt, model
        self.problems = Problems()
        self.cached: list[SchemaPiece] = []
        self.fresh: list[FreshText] = []
        self.modules = {module.path: module for module in compiled.layout.modules() if module.path in prompt.arguments}
        self.taken: list[tuple[int, int]] = []
        """Positions in use, with whole slots: start and end of each text, ascending."""
        self.filled: dict[int, int] = {}
        """End by start of the prompt's texts in gaps."""
        self.user_ends: dict[int, int] = {}
        """Start of the closing of a user's turn, by its end, for turns into which more text can be merged."""
        self.imports_left = len(prompt.imports)
        """Number of imports behind the text that is being placed."""
        self.at_end: list[Text | ChatTurn] = []
        """Text and turns that no gap has room for."""

    def place_imports(self) -> None:
        """Place the pieces and arguments of all modules that the prompt uses."""
        scaffolds = self._choose_scaffolds()
        for path, module in self.modules.items():
            scaffold = next((scaffolds[path[:n]] for n in range(1, len(path) + 1) if path[:n] in scaffolds), None)
            keys = self.compiled.keys[path, scaffold]
            for key, span in zip(keys, module.own(), strict=True):
                self.taken.append((span.start, span.end))
                arguments = self.prompt.arguments[path]
                if isinstance(span, SlotSpan) and span.name in arguments:
                    self._place_argument(module, span, arguments[span.name])
                elif module.cached:
                    self.cached.append(self.compiled.pieces[key])
                else:
                    self._place(span.tokens, span.start, "module", module, None)
                if isinstance(span, TextSpan) and span.ends:
                    self.user_ends[span.end] = span.start
            self.user_ends |= {at: at for at in module.open_ends}
        self.taken.sort()

    def place_texts(self) -> None:
        """Place the prompt's own text and turns."""
        self._fill_gaps(self.prompt.tree, ())
        for node in self.at_end:
            self._place_at_end(node)

    def finish(self) -> Assembly:
        end = max((end for _, end in self.taken), default=0)
        check_length(self.problems, self.model, self.prompt.tree.place, "the prompt", end)
        self.problems.require_none()
        return Assembly(
            self.prompt,
            tuple(sorted(self.cached, key=lambda piece: piece.start)),
            tuple(sorted(self.fresh, key=lambda text: text.offset)),
            end,
            self.user_ends.get(end),
            sum(len(piece.tokens) for piece in self.cached),
            sum(len(text.tokens) for text in self.fresh),
        )

    def _choose_scaffolds(self) -> dict[Path, tuple[Path, ...]]:
        """Return by module the largest scaffold that it is in and of which the prompt imports all modules."""
        chosen: dict[Path, tuple[Path, ...]] = {}
        for scaffold in self.compiled.scaffolds:
            if all(path in self.modules and path not in chosen for path in scaffold):
                chosen |= dict.fromkeys(scaffold, scaffold)
        return chosen

    def _place(self, tokens: Sequence[int], start: int, kind: Kind, module: ModuleSpan, role: Role | None) -> None:
        if tokens:
            self.fresh.append(FreshText(tuple(tokens), start, role, kind, module.path, module.confidential))

    def _place_argument(self, module: ModuleSpan, span: SlotSpan, argument: Argument) -> None:
        tokens = self.model.encode(PromptText.plain(span.lead + argument.value)) if argument.value else []
        if len(tokens) > span.length:
            message = f"the argument of {argument.name!r} has {len(tokens)} tokens"
            self.problems.add(argument.place, message, f"at most {span.length}")
        self._place(tokens, span.start, "argument", module, None)

    def _place_at_end(self, node: Text | ChatTurn) -> None:
        """Place a text or turn at the end; merge a user's turn into one right before it if turns must alternate."""
        chat, encode, at = self.model.chat, self.model.encode, self._end
        if isinstance(node, Text):
            return self._place_text(encode(PromptText.plain(node.text)), at, None)
        words = "".join(child.text for child in node.children if isinstance(child, Text))
        if chat.merges is None or node.role not in ("user", "system" if chat.leads else "user"):
            return self._place_text(encode(chat.turn(node.role, words)), at, node.role)
        opened = self.user_ends.pop(at, None)
        if opened is not None and opened < at:
            self.taken.remove((opened, at))
            self.cached = [piece for piece in self.cached if piece.start != opened]
            self.fresh = [text for text in self.fresh if text.offset != opened]
        opening = chat.user.plain if opened is None else str(chat.merges)
        start = at if opened is None else opened
        self._place_text(encode(PromptText.special(opening) + chat.part(words)), start, node.role)
        behind = self._end
        if chat.user.after:
            self._place_text(encode(chat.user.after), behind, node.role)
        self.user_ends[self._end] = behind
        return None

    @property
    def _end(self) -> int:
        """Position after everything that is placed."""
        return self.taken[-1][1] if self.taken else 0

    def _place_text(self, tokens: Sequence[int], start: int, role: Role | None) -> None:
        self._place(tokens, start, "text", self.compiled.layout, role)
        insort(self.taken, (start, start + len(tokens)))

    def _fill_gaps(self, tree: PromptTree | Import, path: Path) -> None:
        """Place the texts inside the prompt, or an import of it, in the gaps before the next import."""
        inside = [(*path, child.name) for child in tree.children if isinstance(child, Import)]
        start, stop = self.modules[path].start, self.modules[inside[0]].start if inside else self.modules[path].end
        for child in tree.children:
            if isinstance(child, Import):
                module = self.modules[(*path, child.name)]
                start, stop = module.start, module.end
                self.imports_left -= 1
                self._fill_gaps(child, module.path)
            elif isinstance(child, ChatTurn) or not (self.imports_left and self._fits(child, start, stop)):
                self.at_end.append(child)

    def _fits(self, text: Text, start: int, stop: int) -> bool:
        """Place a text behind all that is between two positions, if it fits there."""
        tokens = self.model.encode(PromptText.plain(text.text))
        start = max((end for at, end in self.taken if start <= at and end <= stop), default=start)
        start = self.filled.get(start, start)
        limit = min((at for at, end in self.taken if at >= start and end > at), default=start + len(tokens))
        if start + len(tokens) > limit:
            return False
        self._place_text(tokens, start, None)
        self.filled[start] = start + len(tokens)
        return True


@dataclass
class PromptView(AbstractContextManager["PromptView"]):
    """The view of an encoded prompt: `engine.decode([view.call()])` answers it.

    Its leases end with the `engine.scope()` in which it was made, with `release`, or with its block:
    `with library.assemble(prompt) as view`.
    """

    chat: ChatFormat
    end: int
    """Position where an answer starts."""
    cached_tokens: int
    """Tokens of cached modules."""
    fresh_tokens: int
    """Tokens of arguments, uncached modules, and the prompt's own text."""
    leases: Leases
    modules: list[MessageHandle]
    """Handles of the cached modules."""
    placed: list[tuple[int, MessageHandle]]
    """Positions and handles of all that an answer attends to, in order."""

    @property
    def handles(self) -> list[MessageHandle]:
        """Handles of all that an answer attends to, in the order of positions."""
        return [handle for _, handle in self.placed]

    @property
    def offsets(self) -> list[int | None]:
        """Position of each handle."""
        return [offset for offset, _ in self.placed]

    def call(self, sampling: Sampling | None = None, **options: Any) -> Decode:
        """Return the assistant's call that answers it; `options` as for `engine.decode`: `author` names the speaker."""
        # A header that opens thoughts is only for calls that split them from the answer: else readers would get both.
        opening = self.chat.header(options.get("author"), thinking=options.get("thinking") is not None)
        usual: dict[str, Any] = {
            "header": opening,
            "turn_suffix": self.chat.turn_end,
            "sampling": sampling or Sampling(),
        }
        context = {"parents": self.handles, "offsets": self.offsets, "position": self.end}
        return Decode(**(usual | context | options))

    def release(self) -> None:
        """Release the leases. Called once."""
        self.leases.release()

    def __exit__(self, *_: object) -> None:
        self.release()


def encoded_view(engine: Engine, assembly: Assembly, leases: Leases) -> PromptView:
    """Return the view of a prompt, with its fresh texts prefilled lazily, each attending to everything before it.

    Args:
        engine: Holds the modules, and encodes the rest.
        assembly: The prompt.
        leases: Leases of its cached pieces, which the view takes over.
    """
    modules = [*leases.handles]
    placed = [(piece.start, handle) for piece, handle in zip(assembly.cached, modules, strict=True)]
    view = PromptView(engine.chat, assembly.end, assembly.cached_tokens, assembly.fresh_tokens, leases, modules, placed)
    try:
        for text in assembly.fresh:
            offsets = [offset for offset, _ in placed if offset < text.offset]
            own: Any = {"author": "/".join(text.module) or None, "role": text.role, "confidential": text.confidential}
            context = (view.handles[: len(offsets)], offsets, text.offset)
            handle = engine.prefill(text.tokens, *context, lazy=True, **own)
            leases.handles.append(handle)
            placed.insert(len(offsets), (text.offset, handle))
    except BaseException:
        view.release()
        raise
    return view
