"""Every error that this package raises on purpose.

    ChoreoError
    ├── InvalidRequestError (ValueError)      a call that can never work: empty header, wrong offsets, ...
    │   ├── ContextLengthError                its view is longer than the model's context
    │   ├── KVBudgetError                     it needs more KV memory than the engine's whole budget
    │   ├── EngineMismatchError               an engine that cannot work with the others: other model, version, ...
    │   ├── GrammarError                      a schema, regular expression or grammar that cannot be compiled
    │   └── UnknownArgumentError (TypeError)  an argument that does not exist; names the nearest that does
    ├── ConstraintError (ValueError)          the text does not satisfy the constraint; carries the text
    ├── HandleError (LookupError)
    │   ├── UnknownHandleError                never created by this engine, or under another salt
    │   ├── ReleasedHandleError               its last lease was dropped
    │   └── ForeignHandleError                created by another model
    ├── ForeignThreadError (LookupError)      a thread of a graph that belongs to another tenant
    ├── VisibilityError (ValueError)          a declaration that names no node, or a read that none allows
    ├── AdapterError (ValueError)             an adapter or cache mapper of another model, damaged, or not loaded
    ├── ReplayError (ValueError)              a recording that its graph cannot be replayed over here
    ├── UnsupportedModelError (ValueError)    a model whose attention or positions the engine cannot serve exactly
    ├── ModelNotFoundError (FileNotFoundError) no such folder, no such model on the hub, or the hub is unreachable
    ├── PMLError (ValueError)                 an invalid schema or prompt; lists every problem and its position
    ├── CapacityError                         KV memory is full for now; may be retried after a release
    ├── ThreadBusyError                       a thread is running, and cannot be deleted now; may be retried
    ├── StoreError (OSError)                  the store of a run's lineage failed: full, locked, unreachable, ...
    ├── RequestTimeoutError (TimeoutError)    a call did not finish within its timeout
    ├── EngineClosedError (RuntimeError)      the engine was closed
    │   └── EngineForkedError                 it belongs to the parent process, which goes on using it
    ├── EngineLostError (RuntimeError)        a remote engine is lost or unreachable, with the KV that it had
    ├── ScriptError (LookupError)             a test's script has no line for a call, or none that is allowed
    ├── EngineFailedError                     a call failed in the engine; the cause is chained
    │   └── DeviceLostError (RuntimeError)    the device stopped computing, and the engine has ended
    ├── KVMemoryError (RuntimeError)          KV memory would have been used after it was freed: a bug of ours
    └── TrainingError                         a training run cannot start, or go on from its checkpoint

Errors that LangChain has a class for derive from that class, too, so that its fallbacks, middleware and retries
recognize them: `InvalidRequestError` is a `ModelInvalidRequestError`, `ContextLengthError` and `KVBudgetError` a
`ContextOverflowError`, `ModelNotFoundError` its namesake, `CapacityError` a `ModelRateLimitError`,
`RequestTimeoutError` a `ModelTimeoutError`, `EngineClosedError` and `EngineLostError` a `ModelConnectionError`,
`EngineFailedError` a `ModelAPIError`.

Permanent errors are also `ValueError`, `LookupError`, `RuntimeError` or `OSError`, as are timeouts, which LangGraph
does not retry by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from langchain_core import exceptions as langchain


def error_text(error: BaseException) -> str:
    """Return `repr(error)`, or its type's name if `repr` itself fails."""
    try:
        return repr(error)
    except Exception:
        return f"{type(error).__name__}(...)"


class ChoreoError(Exception):
    """Base of all errors of this package."""


class InvalidRequestError(ChoreoError, langchain.ModelInvalidRequestError, ValueError):
    """A call that can never work as it was written."""


class ContextLengthError(InvalidRequestError, langchain.ContextOverflowError):
    """A view and its new message reach past the model's context."""


class KVBudgetError(InvalidRequestError, langchain.ContextOverflowError):
    """A call that needs more KV memory than the engine's whole budget."""


class GrammarError(InvalidRequestError):
    """A schema, regular expression or grammar that cannot constrain an answer; the message names the culprit."""


class UnknownArgumentError(InvalidRequestError, TypeError):
    """A call with an argument that does not exist; the message names the nearest that does."""


class EngineMismatchError(InvalidRequestError):
    """Engines that cannot work together: they have other models, dtypes or versions of this package."""


class ConstraintError(ChoreoError, ValueError):
    """A text that does not satisfy its constraint or an agent's output type; `said` is the whole text.

    The same call gives the same text again: give it more tokens, another constraint or another seed.
    """

    def __init__(self, message: str, text: str = "") -> None:
        self.text = text
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ConstraintError], tuple[str, str]]:
        return type(self), (str(self), self.text)


class HandleError(ChoreoError, LookupError):
    """A handle that this engine cannot resolve."""


class UnknownHandleError(HandleError):
    """A handle that this engine never gave out."""


class ReleasedHandleError(HandleError):
    """A handle whose last lease was dropped."""


class ForeignHandleError(HandleError):
    """A handle made by another model."""


class ForeignThreadError(ChoreoError, LookupError):
    """A thread of a multi-tenant graph that was begun by another tenant, or by none."""


class VisibilityError(ChoreoError, ValueError):
    """A visibility declaration that cannot hold, or a read that no declaration allows."""


class CutAnswerWarning(UserWarning):
    """An answer was cut at the default of `max_tokens`."""


class VisibilityWarning(UserWarning):
    """A promise about a private context that is not kept, where the policy is to go on."""


class ProvenanceWarning(UserWarning):
    """A message whose author is not proven, so that it counts as input."""


class AdapterError(ChoreoError, ValueError):
    """An adapter or cache mapper that does not fit the model, is damaged, or is not loaded."""


class ReplayError(ChoreoError, ValueError):
    """A recording that its graph cannot be replayed over; the message says what is missing or does not fit."""


class UnsupportedModelError(ChoreoError, ValueError):
    """A model that the engine cannot serve exactly; the message gives the reason."""


class ChatTemplateError(UnsupportedModelError):
    """A chat template that fails on the simplest conversation; the message has the template's own error."""


class ModelNotFoundError(ChoreoError, langchain.ModelNotFoundError, FileNotFoundError):
    """A model that is neither a folder, nor in the local hub cache, nor on a reachable hub."""


@dataclass(frozen=True)
class PMLProblem:
    """A single problem in a schema or prompt; lines and columns count from 1."""

    file: str
    line: int
    column: int
    message: str
    expected: str = ""
    """What should stand there instead."""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}:{self.column}: {self.message}"
        return f"{text}; expected {self.expected}" if self.expected else text


class PMLError(ChoreoError, ValueError):
    """An invalid schema or prompt; `problems` lists all that were found, in order of position."""

    def __init__(self, problems: Iterable[PMLProblem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.file, problem.line, problem.column)))
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[PMLError], tuple[tuple[PMLProblem, ...]]]:
        return type(self), (self.problems,)


class CapacityError(ChoreoError, langchain.ModelRateLimitError):
    """The KV pool has no room now; a release or a finished request may make some."""


class ThreadBusyError(ChoreoError):
    """A thread that cannot be deleted while it runs, or cannot run while it is being deleted: retry later."""


class StoreError(ChoreoError, OSError):
    """A failure of the store of runs' lineage; `__cause__` is the store's error. What was written before is kept."""


class LineageWarning(UserWarning):
    """Messages are encoded again from their text although their KV was to be read; the warning says why."""


class RequestTimeoutError(ChoreoError, langchain.ModelTimeoutError, TimeoutError):
    """A call that did not finish within its timeout."""


class EngineClosedError(ChoreoError, langchain.ModelConnectionError, RuntimeError):
    """The engine was closed before or during the call."""


class EngineForkedError(EngineClosedError):
    """The engine was loaded before `os.fork()`: it is the parent process's."""


class EngineLostError(ChoreoError, langchain.ModelConnectionError, RuntimeError):
    """A remote engine that is lost or unreachable; the KV that it had is computed again where it is read."""


class ScriptError(ChoreoError, LookupError):
    """A call to a scripted engine for which the script has no line, or none that is allowed."""


class EngineFailedError(ChoreoError, langchain.ModelAPIError):
    """A call failed in the engine, and no other with it; `__cause__` is the failure."""


class DeviceLostError(EngineFailedError, RuntimeError):
    """The device that the engine computes on no longer responds; `__cause__` is how that was noticed."""


class KVMemoryError(ChoreoError, RuntimeError):
    """KV memory would have been read, written or freed again after it was freed; the access is refused.

    This is a bug of this package, not of the call that fails with it: please report it.
    """


class TrainingError(ChoreoError):
    """A training run that cannot start or go on: its checkpoint is damaged or another run's, or it learnt nothing."""
