"""The process of `choreo serve`: logging, loading of engines, and graceful shutdown."""

from __future__ import annotations

import socket
import warnings
from copy import deepcopy
from logging.config import dictConfig
from types import FrameType
from typing import Any

import torch
import uvicorn
from uvicorn.config import LOGGING_CONFIG

from choreo_agents import Engine
from choreo_agents.errors import CutAnswerWarning, InvalidRequestError
from choreo_server.app import ServerApp


def log_to_stderr(level: str) -> None:
    """Log messages of the server and its engine from a level on to stderr."""
    config = deepcopy(LOGGING_CONFIG)
    config["formatters"]["default"]["fmt"] = "%(asctime)s %(levelprefix)s %(message)s"
    ours = {"handlers": ["default"], "level": level.upper()}
    config["loggers"] |= dict.fromkeys(("choreo_agents", "choreo_ray", "choreo_server"), ours)
    dictConfig(config)
    warnings.simplefilter("ignore", CutAnswerWarning)  # clients read it in `finish_reason`


def require_free(host: str, port: int) -> None:
    """Raise `InvalidRequestError` if the server could not listen there; checked before the slow loading of a model."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on --host {host} --port {port} ({error.strerror}): use others, or --port 0 for a free one"
        ) from None


def load_engine(model: str, engines: int, threads: int | None, dtype: str, options: dict[str, Any]) -> Engine:
    """Load a model in this process, or with several engines in Ray actors."""
    options["dtype"] = dtype
    if engines == 1:
        if threads is not None:
            torch.set_num_threads(threads)
        return Engine.load(model, **options)
    try:
        from choreo_ray import RayEngine  # noqa: PLC0415 - a distribution of its own, which few need
    except ModuleNotFoundError as missing:
        raise InvalidRequestError(
            f"several engines need Ray, but {missing.name!r} is not installed: pip install choreo-ray"
        ) from None
    actor: dict[str, Any] = {"threads": threads or 1, "num_cpus": threads or 1, "num_gpus": _gpus(options["device"])}
    return RayEngine.load(model, engines=engines, **actor, **options)


def _gpus(device: str) -> int:
    """Return the number of GPUs of each of several engines: 0 or 1."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and number not in ("", "0"):
        raise InvalidRequestError(f"several engines need a GPU each: use --device cuda, not {device!r}")
    return int(kind == "cuda" or (kind == "auto" and torch.cuda.is_available()))


class StoppingServer(uvicorn.Server):
    """A uvicorn server that rejects new requests as soon as it gets a signal to stop."""

    def __init__(self, config: uvicorn.Config, app: ServerApp) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.stopping = True
        super().handle_exit(sig, frame)
        # Else uvicorn raises the signal again after shutdown, and kills the process before the engine is closed.
        self._captured_signals.clear()
