"""What work costs, and on which machine, model and versions that was measured."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from choreo_agents.engine.elsewhere.routing import Costs
from choreo_agents.engine.recording import RecordingHeader
from choreo_agents.errors import InvalidRequestError
from choreo_agents.training.journal import Record


@dataclass(frozen=True)
class ServingCosts:
    """Of engines, what is between them, and what is before them. Guesses for a CPU where nothing was measured."""

    call_s: float = Costs.call_s
    """As in `Costs`; what is asked of the directory, and its answer, are as long on their way."""
    copy_s: float = Costs.copy_s
    copy_bytes_per_s: float = Costs.copy_bytes_per_s
    encode_tokens_per_s: float = Costs.encode_tokens_per_s
    step_s: float = Costs.step_s
    row_s: float = Costs.row_s
    """As in `Costs`, by which calls are placed, too."""
    attended_s: float = 0.0
    """That each token to which rows of a step attend adds to it: once, if several attend to the same."""
    segment_s: float = 0.0
    """That each message which a row reads adds to a step."""
    front_s: float = 3e-3
    """CPU of the front's process for a call, before it is sent."""
    answer_s: float = 1e-3
    """The same, once its answer is there."""
    token_s: float = 0.0
    """The same, for each token that is handed on as it comes."""
    lookup_s: float = 5e-6
    """Of the directory, which several fronts have, for an id that it is asked for or told, ..."""
    directory_s: float = 0.0
    """... and each time that it is."""
    bytes_per_token: int | None = None
    """Of KV; None: as the recorded model has it."""
    cores: float | None = None
    """That all engines and fronts share, each of which computes with one; None: each machine has enough of its own."""

    def __post_init__(self) -> None:
        positive = ("copy_bytes_per_s", "encode_tokens_per_s", "step_s", "bytes_per_token", "cores")
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < float("inf") or (each.name in positive and not value):
                least = "a number above 0" if each.name in positive else "a number from 0 on"
                raise InvalidRequestError(f"{each.name} must be {least}, not {value!r}")

    @property
    def routing(self) -> Costs:
        """Those by which the product places calls."""
        return Costs(**{each.name: getattr(self, each.name) for each in fields(Costs)})

    def step_of(self, rows: int, tokens: int, attended: int, segments: int) -> float:
        """Seconds that a step takes.

        Args:
            rows: Of it.
            tokens: That it encodes: one a row, and more of prefills.
            attended: Tokens that its rows attend to, each of which counts once.
            segments: Messages that its rows read, each of which counts for every row.
        """
        more = (tokens - rows) / self.encode_tokens_per_s
        seen = self.attended_s * attended + self.segment_s * segments
        return self.step_s + self.row_s * (rows - 1) + more + seen


COST_NAMES = tuple(each.name for each in fields(ServingCosts))


_OPTIONAL = {"attended_s", "segment_s", "token_s", "directory_s", "bytes_per_token", "cores"}
"""What may be left out: nothing is guessed then."""


class MeasuredOn(BaseModel):
    """Where costs were measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: str
    processor: str
    cores: int
    device: str
    threads: int
    model: str
    """Its name or folder."""
    fingerprint: str
    dtype: str
    versions: Mapping[str, str]

    @classmethod
    def here(cls, conditions: Mapping[str, str], model: str) -> MeasuredOn:
        """This machine, with what a model's bits depend on (see `conditions_of`)."""
        return cls(
            machine=platform.node(),
            processor=processor(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            device=conditions["device"],
            threads=int(conditions["threads"]),
            model=model,
            fingerprint=conditions["model"],
            dtype=conditions["dtype"],
            versions={name: version(name) for name in ("choreo-agents", "torch", "transformers")},
        )


class CostsFile(BaseModel):
    """What a file of costs holds: some or all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    costs: Mapping[str, float]
    """By the names that `ServingCosts` has for them."""
    measured_on: MeasuredOn | None = None
    """None: it was not measured, but assumed."""

    @model_validator(mode="after")
    def _known(self) -> CostsFile:
        unknown = sorted(self.costs.keys() - set(COST_NAMES))
        if unknown:
            raise ValueError(f"there is no cost {unknown[0]!r}: there are {', '.join(COST_NAMES)}")
        ServingCosts(**self.costs)  # type: ignore[arg-type]
        return self

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.model_dump(mode="json", exclude_none=True), indent=2) + "\n")


def read_costs(path: str | Path) -> CostsFile:
    """Costs in a file.

    Raises:
        InvalidRequestError: It holds none. OSError: It cannot be read.
    """
    try:
        return CostsFile.model_validate_json(Path(path).read_bytes())
    except ValidationError as error:
        what = error.errors()[0]
        place = ".".join(map(str, what["loc"]))
        raise InvalidRequestError(
            f"{str(path)!r} holds no costs: {f'{place}: ' if place else ''}{what['msg']}. choreo simulate --costs "
            "measure --save-costs FILE writes some"
        ) from None


@dataclass(frozen=True)
class KnownCosts:
    """Costs with where they come from."""

    costs: ServingCosts
    notes: tuple[str, ...]
    """What is to be said of them."""
    sources: Sequence[Record] = ()
    """Where each part was measured, as plain JSON."""


def known_costs(files: Sequence[CostsFile], header: RecordingHeader, *, any_model: bool = False) -> KnownCosts:
    """Costs of several files, the later before the earlier, for a recorded model.

    Args:
        files: The rest is guessed.
        header: Of the recording that they are used for.
        any_model: Whether they may be another model's.

    Raises:
        InvalidRequestError: They were measured with another model.
    """
    costs, notes, guessed = ServingCosts(), list[str](), set(COST_NAMES) - _OPTIONAL
    for file in files:
        costs = replace(costs, **file.costs)  # type: ignore[arg-type]
        guessed -= file.costs.keys()
        if file.measured_on is not None:
            notes += _differences(file.measured_on, header, any_model=any_model)
    if guessed:
        names = ", ".join(name for name in COST_NAMES if name in guessed)
        notes.append(f"guessed, not measured: {names}")
    if costs.bytes_per_token is None:
        costs = replace(costs, bytes_per_token=header.bytes_per_token)
    sources = [file.model_dump(mode="json", exclude_none=True) for file in files]
    return KnownCosts(costs, tuple(notes), sources)


def _differences(measured: MeasuredOn, header: RecordingHeader, *, any_model: bool) -> list[str]:
    conditions, notes = header.conditions, []
    if measured.fingerprint != conditions["model"]:
        what = (
            f"the costs are of the model {measured.model!r} ({measured.fingerprint}), and the calls were recorded with "
            f"{header.model!r} ({conditions['model']})"
        )
        if not any_model:
            raise InvalidRequestError(f"{what}: measure them with that, or say --any-model to ask what if")
        notes.append(what)
    told = {"device": measured.device, "threads": str(measured.threads), "torch": measured.versions.get("torch", "")}
    notes += [
        f"costs were measured with {name} {value}, and calls recorded with {conditions[name]}"
        for name, value in told.items()
        if conditions.get(name, value) != value
    ]
    if measured.machine != platform.node():
        notes.append(f"costs are of the machine {measured.machine!r} ({measured.processor}), not of this one")
    own = version("choreo-agents")
    if (theirs := measured.versions.get("choreo-agents", own)) != own:
        notes.append(f"costs were measured with choreo-agents {theirs}, and this is {own}")
    return notes


def processor() -> str:
    """What this machine computes with."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def as_plain(costs: ServingCosts) -> dict[str, Any]:
    """As JSON has it, without what is not limited."""
    return {name: value for name, value in asdict(costs).items() if value is not None}
