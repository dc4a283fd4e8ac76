"""Every error that this package raises on purpose.

    ChoreoError
    ├── InvalidRequestError (ValueError)      a call that can never work: empty header, wrong offsets, ...
    │   ├── ContextLengthError                its view is longer than the model's context
    │   ├── KVBudgetError                     it needs more KV memory than the engine's whole budget
    │   ├── EngineMismatchError               an engine that cannot work with the others: other model, version, ...
    │   ├── GrammarError                      a schema, regular expression or grammar that nothing can be led by
    │   └── UnknownArgumentError (TypeError)  an argument that there is not; names the nearest that there is
    ├── ConstraintError (ValueError)          the text does not satisfy the constraint; carries the text
    ├── HandleError (LookupError)
    │   ├── UnknownHandleError                never made by this engine, or under another salt
    │   ├── ReleasedHandleError               its last lease was dropped
    │   └── ForeignHandleError                made by another model
    ├── ForeignThreadError (LookupError)      a thread of a graph that belongs to another tenant
    ├── VisibilityError (ValueError)          a declaration that names no node, or a read that none allows
    ├── AdapterError (ValueError)             an adapter or cache mapper of another model, damaged, or not loaded
    ├── ReplayError (ValueError)              a recording over which its graph cannot be run again here
    ├── UnsupportedModelError (ValueError)    a model whose attention or positions the engine cannot serve exactly
    ├── ModelNotFoundError (FileNotFoundError) no such folder, no such model on the hub, or no hub within reach
    ├── PMLError (ValueError)                 a schema or prompt that is not right, with every problem and its place
    ├── CapacityError                         KV memory is full for now; may be retried after a release
    ├── ThreadBusyError                       a thread is under way, and cannot be forgotten now; may be tried again
    ├── StoreError (OSError)                  the store of a run's lineage has failed: full, locked, out of reach, ...
    ├── RequestTimeoutError (TimeoutError)    a call was not done in the time that it was given
    ├── EngineClosedError (RuntimeError)      the engine was closed
    │   └── EngineForkedError                 it is the parent process's, which goes on with it
    ├── EngineLostError (RuntimeError)        an engine elsewhere is gone, or cannot be reached, with what it had
    ├── ScriptError (LookupError)             a test's script has nothing to say, or nothing that is allowed
    ├── EngineFailedError                     a call failed in the engine; the cause is chained
    │   └── DeviceLostError (RuntimeError)    the device computes no more, and the engine has ended
    ├── KVMemoryError (RuntimeError)          KV memory that was given back would have been used: a fault of ours
    └── TrainingError                         a training run cannot start, or go on from its checkpoint

What LangChain has an error for is that, too, so that its fallbacks, middleware and retries know it: an
`InvalidRequestError` a `ModelInvalidRequestError`, `ContextLengthError` and `KVBudgetError` a `ContextOverflowError`,
`ModelNotFoundError` its own, `CapacityError` a `ModelRateLimitError`, `RequestTimeoutError` a `ModelTimeoutError`,
`EngineClosedError` and `EngineLostError` a `ModelConnectionError`, `EngineFailedError` a `ModelAPIError`.

Permanent errors are also `ValueError`, `LookupError`, `RuntimeError` or `OSError`, as are timeouts, which LangGraph
does not retry by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from langchain_core import exceptions as langchain


def error_text(error: BaseException) -> str:
    """What an error says of itself; of one that cannot say it, what it is."""
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
    """A schema, regular expression or grammar that no answer can be led by; the message names what it cannot be."""


class UnknownArgumentError(InvalidRequestError, TypeError):
    """A call with an argument that there is not; the message names the nearest that there is."""


class EngineMismatchError(InvalidRequestError):
    """Engines that are to work together and cannot: they have other models, dtypes or versions of this package."""


class ConstraintError(ChoreoError, ValueError):
    """What was said is not what its constraint, or the type of an agent's output, asks for; `said` has all its words.

    The same call says the same again: it takes more tokens, another constraint or another seed.
    """

    def __init__(self, message: str, said: str = "") -> None:
        self.said = said
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ConstraintError], tuple[str, str]]:
        return type(self), (str(self), self.said)


class HandleError(ChoreoError, LookupError):
    """A handle that this engine cannot resolve."""


class UnknownHandleError(HandleError):
    """A handle that this engine never gave out."""


class ReleasedHandleError(HandleError):
    """A handle whose last lease was dropped."""


class ForeignHandleError(HandleError):
    """A handle made by another model."""


class ForeignThreadError(ChoreoError, LookupError):
    """A thread of a graph that serves several tenants, and that another of them began, or none."""


class VisibilityError(ChoreoError, ValueError):
    """A visibility declaration that cannot hold, or a read that no declaration allows."""


class CutAnswerWarning(UserWarning):
    """An answer was cut at the default of `max_tokens`."""


class VisibilityWarning(UserWarning):
    """A promise about a private context is not kept, and the policy says to go on."""


class ProvenanceWarning(UserWarning):
    """Who said a message is not proven, so that it counts as input."""


class AdapterError(ChoreoError, ValueError):
    """An adapter or cache mapper that does not fit the model, that its files do not hold, or that is not loaded."""


class ReplayError(ChoreoError, ValueError):
    """A recording over which its graph cannot be run again here; the message says what is missing or does not fit."""


class UnsupportedModelError(ChoreoError, ValueError):
    """A model that the engine cannot serve exactly; the message gives the reason."""


class ChatTemplateError(UnsupportedModelError):
    """A chat template that fails on the simplest conversation; the message has its reason."""


class ModelNotFoundError(ChoreoError, langchain.ModelNotFoundError, FileNotFoundError):
    """A model that is neither a folder, nor in the local hub cache, nor on a hub that can be reached."""


@dataclass(frozen=True)
class PMLProblem:
    """One thing that is wrong in a schema or prompt; lines and columns count from 1."""

    file: str
    line: int
    column: int
    message: str
    expected: str = ""
    """What should stand there."""

    def __str__(self) -> str:
        said = f"{self.file}:{self.line}:{self.column}: {self.message}"
        return f"{said}; expected {self.expected}" if self.expected else said


class PMLError(ChoreoError, ValueError):
    """A schema or prompt that is not right; `problems` has all that were found, in the order of their places."""

    def __init__(self, problems: Iterable[PMLProblem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda each: (each.file, each.line, each.column)))
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[PMLError], tuple[tuple[PMLProblem, ...]]]:
        return type(self), (self.problems,)


class CapacityError(ChoreoError, langchain.ModelRateLimitError):
    """The KV pool has no room now; a release or a finished request may make some."""


class ThreadBusyError(ChoreoError):
    """A thread that is to be forgotten is under way, or one that is to run is being forgotten: try again later."""


class StoreError(ChoreoError, OSError):
    """What keeps the lineage of runs has failed; `__cause__` is how. What was reported before stands there."""


class LineageWarning(UserWarning):
    """Messages are encoded again from their words, where an encoding was to be read: the warning says why."""


class RequestTimeoutError(ChoreoError, langchain.ModelTimeoutError, TimeoutError):
    """A call was not done in the time that it was given."""


class EngineClosedError(ChoreoError, langchain.ModelConnectionError, RuntimeError):
    """The engine was closed before or during the call."""


class EngineForkedError(EngineClosedError):
    """The engine was loaded before `os.fork()`: it is the parent process's."""


class EngineLostError(ChoreoError, langchain.ModelConnectionError, RuntimeError):
    """An engine elsewhere is gone, or cannot be reached: what it had is computed again where it is read."""


class ScriptError(ChoreoError, LookupError):
    """A scripted engine was asked for what its script does not say, or may not say there."""


class EngineFailedError(ChoreoError, langchain.ModelAPIError):
    """A call failed in the engine, and no other with it; `__cause__` is the failure."""


class DeviceLostError(EngineFailedError, RuntimeError):
    """The device that the engine computes on answers no more; `__cause__` is how that was seen."""


class KVMemoryError(ChoreoError, RuntimeError):
    """KV memory that was given back would have been read, written or given back again, which is refused.

    A fault of this package's, not of the call that fails with it: please report it.
    """


class TrainingError(ChoreoError):
    """A training run cannot start or go on: its checkpoint is damaged or another run's, or it learnt nothing."""
