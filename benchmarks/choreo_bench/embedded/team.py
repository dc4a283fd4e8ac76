"""Processes that share a training run's steps: each works on some of a step's batches, all take the same step."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Protocol

import torch
from torch import Tensor

from choreo_agents.errors import TrainingError

PATIENCE_S = 300.0
"""How long processes wait for each other: for a score or a checkpoint, not for one that was killed without a word."""


@dataclass(frozen=True)
class Team:
    """A process's part in a run whose every step has `len(shared)` batches.

    Gradients are added in the batches' order, whoever worked on which: any number of processes, with one thread each,
    gives the same weights.
    """

    shared: Tensor
    """[batches of a step, parameters + 1]: the gradient of each batch, and its loss."""
    number: int = 0
    processes: int = 1
    barrier: Barrier | None = None

    @classmethod
    def alone(cls, batches: int, parameters: int) -> Team:
        """Make a team of one process, which does all the work."""
        return cls(torch.zeros(batches, parameters + 1))

    @property
    def mine(self) -> range:
        """The batches of each step that this process works on."""
        return range(self.number, len(self.shared), self.processes)

    def put(self, batch: int, parameters: Sequence[Tensor], loss: Tensor) -> None:
        """Hand in the gradient of a batch, and take it off the parameters."""
        row = self.shared[batch]
        at = 0
        for parameter in parameters:
            row[at : at + parameter.numel()] = 0.0 if parameter.grad is None else parameter.grad.flatten()
            at += parameter.numel()
            parameter.grad = None
        row[at] = loss

    def take(self, batches: int, parameters: Sequence[Tensor]) -> float:
        """Give every parameter the mean gradient of a step's batches, once all are in.

        Returns:
            Their mean loss.

        Raises:
            TrainingError: Another process of the team ended.
        """
        self._meet()
        mean = self.shared[0].clone()
        for row in self.shared[1:batches]:
            mean += row
        mean /= batches
        self._meet()
        at = 0
        for parameter in parameters:
            parameter.grad = mean[at : at + parameter.numel()].view_as(parameter).to(parameter.device)
            at += parameter.numel()
        return float(mean[at])

    def leave(self) -> None:
        """Let nobody wait for this process any longer."""
        if self.barrier is not None:
            self.barrier.abort()

    def _meet(self) -> None:
        if self.barrier is None:
            return
        try:
            self.barrier.wait(PATIENCE_S)
        except BrokenBarrierError as error:
            raise TrainingError("another process of the training run ended: start the run again to continue") from error


class Helper(Protocol):
    """Function that the other processes of a team run; importable by name."""

    def __call__(self, team: Team, /) -> None: ...


@contextmanager
def teamed(helper: Helper, batches: int, parameters: int, processes: int) -> Iterator[Team]:
    """Start `processes - 1` helpers for as long as the block lasts; this process is the first of the team."""
    if processes == 1:
        yield Team.alone(batches, parameters)
        return
    context = multiprocessing.get_context("spawn")
    shared: Tensor = torch.zeros(batches, parameters + 1)
    shared.share_memory_()  # type: ignore[no-untyped-call]
    barrier = context.Barrier(processes)
    others = [Team(shared, number, processes, barrier) for number in range(1, processes)]
    started: list[SpawnProcess] = []
    try:
        for team in others:
            process = context.Process(target=helper, args=(team,), daemon=True)
            process.start()
            started.append(process)
        yield Team(shared, 0, processes, barrier)
    finally:
        barrier.abort()
        for process in started:
            process.join(5)
            if process.is_alive():
                process.kill()
