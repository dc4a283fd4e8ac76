"""Recording of chat-model calls outside of graphs: the calls of one thread form one run."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

from langchain_core.messages import AIMessage

from choreo_agents.chat.call import ChatCall
from choreo_agents.engine import Engine
from choreo_agents.engine.messages.message import place
from choreo_agents.engine.recording.format import RunEnded, RunStarted
from choreo_agents.engine.recording.recorder import Recorder, key_path


class RecordedChats:
    """Recording of one engine's chat-model calls, until `close`.

    It can be inspected, not replayed: what a client does with an answer is unknown. Thoughts are masked as in
    recordings of graphs.

    Args:
        engine: Engine to record.
        path: A new file.

    Raises:
        InvalidRequestError: The file exists, or the engine already records.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._recording: AbstractContextManager[Recorder] = engine.record(path)
        self._recorder = self._recording.__enter__()
        self._runs: dict[str | None, int] = {}
        self._calls: dict[int, int] = {}

    def close(self) -> None:
        """End all runs and the file. Raises an `OSError` if the file could not be written completely."""
        for run in self._runs.values():
            self._recorder.write(RunEnded(run=run, at_s=self._recorder.at_s(), outcome="done"))
        self._runs.clear()
        self._recording.__exit__(None, None, None)

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._recorder.path

    def note(self, call: ChatCall, asked_s: float, first_s: float | None) -> None:
        """Record a finished call, while its view is still leased.

        Args:
            call: The call.
            asked_s: `time.perf_counter` at its start.
            first_s: `time.perf_counter` at its first token; None: it has none.
        """
        decode, handle, message, recorder = call.decode, call.handle, call.message, self._recorder
        assert decode is not None and handle is not None and message is not None, "it is said"
        engine, run = call.engine, self._run_of(call.thread if isinstance(call.thread, str) else None)
        number = self._calls[run] = self._calls.get(run, -1) + 1
        placed = place([parent.length for parent in decode.parents], decode.offsets, decode.position)
        key = decode.idempotency_key
        thought = () if decode.thinking is None else engine.inspect.thoughts(handle, idempotency_key=key)[:1]
        tokens = engine.tokens(handle)[call.opened :]
        messages = engine.record.messages([handle, *thought, *decode.parents])
        recorder.call(
            messages[1 + len(thought) :],
            messages[0],
            messages[1] if thought else None,
            (asked_s, first_s),
            tokens,
            run=run,
            author=call.request.agent,
            superstep=number,
            branch=0,
            call=0,
            step=number,
            offsets=placed.offsets,
            position=placed.position,
            header_tokens=call.opened,
            tokens=None,
            sampled=message.usage_metadata["output_tokens"] if message.usage_metadata else len(tokens),
            text=_text(message),
            finish_reason=message.response_metadata.get("finish_reason"),
        )

    def _run_of(self, thread: str | None) -> int:
        if thread not in self._runs:
            run = self._runs[thread] = self._recorder.begin_run()
            at_s = self._recorder.at_s()
            self._recorder.write(RunStarted(run=run, at_s=at_s, thread=thread, kept=False, seed=None, input=None))
        return self._runs[thread]


def remove_recording(path: Path) -> None:
    """Remove a recording and its key file, if they exist."""
    for file in (path, key_path(path)):
        file.unlink(missing_ok=True)


def _text(message: AIMessage) -> str:
    """Return the text of an answer, and its tool calls, one a line."""
    calls = (f"{call['name']}({json.dumps(call['args'], ensure_ascii=False)})" for call in message.tool_calls)
    return "\n".join(filter(None, (message.text, *calls)))
