"""Calls of chat models in a recording: no run of a graph has made them, so a thread's calls are one."""

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
    """The calls of one engine that are written down, from now on until `close`.

    They are there to be looked at, and cannot be replayed: what a client makes of an answer is not known here. Thoughts
    are masked as in recordings of graphs.

    Args:
        engine: Whose.
        path: A file that is not there yet.

    Raises:
        InvalidRequestError: The file is there, or something is being recorded.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._recording: AbstractContextManager[Recorder] = engine.record(path)
        self._recorder = self._recording.__enter__()
        self._runs: dict[str | None, int] = {}
        self._calls: dict[int, int] = {}

    def close(self) -> None:
        """All runs are over, and the file ends. Raises an `OSError` if it could not be written to its end."""
        for run in self._runs.values():
            self._recorder.write(RunEnded(run=run, at_s=self._recorder.at_s(), outcome="done"))
        self._runs.clear()
        self._recording.__exit__(None, None, None)

    @property
    def path(self) -> Path:
        """The file."""
        return self._recorder.path

    def note(self, call: ChatCall, asked_s: float, first_s: float | None) -> None:
        """Write down a call that is said, while what it has read is held.

        Args:
            call: Which.
            asked_s: When it was asked, as `time.perf_counter` counts.
            first_s: When the first of its answer came; None: it has none.
        """
        decode, handle, message, recorder = call.decode, call.handle, call.message, self._recorder
        assert decode is not None and handle is not None and message is not None, "it is said"
        engine, run = call.engine, self._run_of(call.thread if isinstance(call.thread, str) else None)
        number = self._calls[run] = self._calls.get(run, -1) + 1
        placed = place([parent.length for parent in decode.parents], decode.offsets, decode.position)
        thought = (
            engine.inspect.thoughts(handle, idempotency_key=decode.idempotency_key)[:1]
            if decode.thinking is not None
            else ()
        )
        tokens = engine.tokens(handle)[call.opened :]
        recorder.call(
            engine.record,
            decode.parents,
            handle,
            thought[0] if thought else None,
            tokens,
            (asked_s, first_s),
            run=run,
            author=call.request.agent,
            superstep=number,
            branch=0,
            call=0,
            step=number,
            offsets=placed.offsets,
            end=placed.position,
            header=call.opened,
            tokens=None,
            count=message.usage_metadata["output_tokens"] if message.usage_metadata else len(tokens),
            words=_words(message),
            finish=message.response_metadata.get("finish_reason"),
        )

    def _run_of(self, thread: str | None) -> int:
        if thread not in self._runs:
            run = self._runs[thread] = self._recorder.begin_run()
            at_s = self._recorder.at_s()
            self._recorder.write(RunStarted(run=run, at_s=at_s, thread=thread, kept=False, seed=None, given=None))
        return self._runs[thread]


def remove_recording(path: Path) -> None:
    """Remove a recording and the key beside it, if they are there."""
    for each in (path, key_path(path)):
        each.unlink(missing_ok=True)


def _words(message: AIMessage) -> str:
    """An answer, and the calls of tools in it."""
    calls = (f"{call['name']}({json.dumps(call['args'], ensure_ascii=False)})" for call in message.tool_calls)
    return "\n".join(filter(None, (message.text, *calls)))
