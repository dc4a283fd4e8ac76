"""The view of a call whose messages are found wherever they stood."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from choreo_agents.chat.asking import ChatRequest
from choreo_agents.chat.encodings import EncodingChoice, Encodings, Said
from choreo_agents.chat.spans import ChatSpan
from choreo_agents.engine import Engine, Prefill
from choreo_agents.kv.handle import MessageHandle


@dataclass
class SpanView:
    """Messages one after the other."""

    handles: list[MessageHandle] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    end: int = 0

    def add(self, handle: MessageHandle) -> None:
        """Append one."""
        self.handles.append(handle)
        self.offsets.append(self.end)
        self.end += handle.length


def view_anywhere(
    engine: Engine, spans: Sequence[ChatSpan], request: ChatRequest, encodings: Encodings, inherits: Sequence[str]
) -> Generator[list[Prefill], list[MessageHandle], SpanView]:
    """Find or encode all that a call is told.

    Args:
        engine: The tenant's.
        spans: All of it. What stands around turns is encoded behind the first alone: it is nobody's.
        request: Of the call.
        encodings: Of its thread; what is encoded is noted there.
        inherits: Names of foreign messages that what is found may have attended to.
    """
    told: list[tuple[ChatSpan, Said]] = [(span, (request.adapter, span.text)) for span in spans]
    tokens = {said: tuple(engine.model.encode(span.text)) for span, said in told if span.handle is None}
    choosing, view = EncodingChoice(engine, encodings, tokens, inherits), SpanView()
    for span, said in told:
        if span.handle is not None:
            view.add(span.handle)
            continue
        joint = not span.role and bool(view.handles)
        call = Prefill(
            tokens[said],
            view.handles[:1] if joint else [*view.handles],
            None if joint else [*view.offsets],
            None if joint else view.end,
            author=f"{request.agent}.{span.role}" if span.role else None,
            adapter=request.adapter,
            lazy=True,
        )
        found = None if not span.role else choosing.choose(said, engine.kv.key(call).id, view.handles)
        if found is None:
            [found] = yield [call]
        if span.role:
            encodings.note(found, said, f"{request.agent}.{span.role}")
        view.add(found)
    encodings.trim(engine)
    return view
