"""`choreo serve`: a model for every program that speaks OpenAI's protocol."""

from __future__ import annotations

import os
import sys
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import torch
import typer
import uvicorn

from choreo_agents import Engine, Memory, Scheduling
from choreo_agents.errors import ChoreoError, InvalidRequestError
from choreo_server.app import ServerApp, server_app
from choreo_server.limits import Limits
from choreo_server.tenancy import Keys

KEYS = "CHOREO_KEYS"
"""Keys of a server where no file is named: `key tenant`, a line each, or with commas between."""
_TURN_S = 0.0005
"""Seconds for which what is said to clients may keep the engine's thread from its next operation."""
_WHERE, _LIMITS, _ENGINE = "Who may call, and where", "Limits", "The engine"
_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def serve(
    model: Annotated[
        str,
        typer.Argument(help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name.", show_default=False),
    ],
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="What clients call the model; by default as it is named here.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.", rich_help_panel=_WHERE)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.", rich_help_panel=_WHERE)] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(
            help=f"A file with [b]KEY TENANT[/b] on each line; by default what {KEYS} says, with commas between.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    called: Annotated[
        list[str] | None,
        typer.Option(
            help="A name by which programs call it without keys, beside its address and [b]localhost[/b].",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Of one request.", rich_help_panel=_LIMITS)] = 4.0,
    max_messages: Annotated[int, typer.Option(min=1, help="In one request.", rich_help_panel=_LIMITS)] = 4096,
    max_answers: Annotated[
        int, typer.Option(min=1, help="Under way or waiting at once, of all tenants.", rich_help_panel=_LIMITS)
    ] = 256,
    tenant_answers: Annotated[
        int | None, typer.Option(min=1, help="The same, of one tenant.", rich_help_panel=_LIMITS, show_default=False)
    ] = None,
    tenant_calls_per_second: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Messages and answers of one tenant that may start; the others wait.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for an answer; 0: as long as it takes.", rich_help_panel=_LIMITS)
    ] = 600.0,
    stop_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds that answers under way have when it stops.", rich_help_panel=_LIMITS)
    ] = 60,
    kv_budget: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="KV memory in GiB; by default half of what is free.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers in one step at most.", rich_help_panel=_ENGINE)] = 256,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, ...; auto: the GPU if there is one.", rich_help_panel=_ENGINE)
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"],
        typer.Option(help="Of weights and KV; auto: the checkpoint's own.", rich_help_panel=_ENGINE),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="That the CPU computes with; by default one for each core, or with --engines one for each engine.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    recordings: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A folder of recordings, whose pages are shown at [b]/inspect[/b]: to each tenant those in the folder "
            "of its name.",
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Record there each answer, its words, what it has read and what that cost: at most 16 files of 8 MiB "
            "for each tenant.",
        ),
    ] = False,
    engines: Annotated[
        int,
        typer.Option(
            min=1,
            help="Several: each is an actor of Ray's, on this machine or on the cluster that RAY_ADDRESS names (needs "
            "[b]choreo-ray[/b]), with a GPU for itself where it computes on one. --kv-budget, --rows and --threads are "
            "each one's.",
            rich_help_panel=_ENGINE,
        ),
    ] = 1,
) -> None:
    """Serve a model to every program that speaks OpenAI's protocol.

    Chat completions with streams, tools, JSON schemas, log-probabilities and [b]n[/b] at
    [b]http://127.0.0.1:8000/v1[/b], and [b]/health[/b] and [b]/metrics[/b]. What one request has read is not read again
    for the next; all requests share the steps of one engine, or of [b]--engines[/b].

    [b]Without keys[/b] whoever reaches the port may call: so it listens on this machine alone unless you say otherwise.
    With them each key is a tenant's, and tenants find nothing of each other. The tenant called [b]operator[/b] is shown
    the metrics of all.

    SIGTERM stops it gracefully: nothing new is taken, and what is under way ends.

    [b]Examples[/b]

      choreo serve HuggingFaceTB/SmolLM2-135M-Instruct
      choreo serve ./llama --model-name llama --port 9000 --kv-budget 4
      choreo serve ./llama --host 0.0.0.0 --keys keys.txt --tenant-answers 16
      choreo serve ./llama --keys keys.txt --recordings recordings --record
      choreo serve ./llama --engines 4
    """
    try:
        if record and recordings is None:
            raise InvalidRequestError("--record: say with --recordings in which folder")
        known = _keys(keys)
        limits = Limits(
            body_bytes=round(max_body_mb * (1 << 20)),
            messages=max_messages,
            request_s=request_timeout or None,
            answers=max_answers,
            tenant_answers=tenant_answers,
            tenant_calls_per_second=tenant_calls_per_second,
        )
        memory = Memory(kv_budget_bytes=None if kv_budget is None else round(kv_budget * (1 << 30)))
        typer.echo(f"loading {model} ...", err=True)
        options: dict[str, Any] = {"dtype": _DTYPES[dtype], "memory": memory, "scheduling": Scheduling(rows=rows)}
        engine = _load(model, engines, threads, options | {"device": device})
    except (ChoreoError, OSError, ValueError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    if not known and not _is_local(host):
        typer.secho(
            f"warning: listening on {host} without keys: whoever reaches it may call. Give it --keys.",
            err=True,
            fg="yellow",
        )
    app = server_app(
        engine,
        name=model_name or Path(model).name,
        keys=known,
        limits=limits,
        called=called or (),
        recordings=recordings,
        records=record,
    )
    sys.setswitchinterval(_TURN_S)
    config = uvicorn.Config(
        app, host=host, port=port, timeout_graceful_shutdown=stop_timeout, access_log=False, server_header=False
    )
    try:
        _Server(config, app).run()
    finally:
        engine.close()
    typer.echo("stopped", err=True)


def _load(model: str, engines: int, threads: int | None, options: dict[str, Any]) -> Engine:
    if engines == 1:
        if threads is not None:
            torch.set_num_threads(threads)
        return Engine.load(model, **options)
    try:
        from choreo_ray import RayEngine  # noqa: PLC0415 - a distribution of its own, which few need
    except ModuleNotFoundError as missing:
        raise InvalidRequestError(
            f"several engines are actors of Ray's, and {missing.name!r} is not installed: pip install choreo-ray"
        ) from None
    each: dict[str, Any] = {"threads": threads or 1, "num_cpus": threads or 1, "num_gpus": _gpus(options["device"])}
    return RayEngine.load(model, engines=engines, **each, **options)


def _gpus(device: str) -> int:
    """That each of several engines has for itself."""
    kind, _, number = device.partition(":")
    if kind == "cuda" and number not in ("", "0"):
        raise InvalidRequestError(f"each of several engines has a GPU of its own: say --device cuda, not {device!r}")
    return int(kind == "cuda" or (kind == "auto" and torch.cuda.is_available()))


def _keys(path: Path | None) -> Keys:
    if path is not None:
        return Keys.read(path)
    if (told := os.environ.get(KEYS)) is None:
        return Keys()
    if not (keys := Keys(told.replace(",", "\n").splitlines())):
        raise InvalidRequestError(f"{KEYS} has no keys: write KEY TENANT into it, or unset it to let everybody in")
    return keys


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(uvicorn.Server):
    """Takes nothing new from the moment on that it is told to stop."""

    def __init__(self, config: uvicorn.Config, app: ServerApp) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.stopping = True
        super().handle_exit(sig, frame)
        # Else it would be raised again when all has ended, and kill us before the engine is closed.
        self._captured_signals.clear()
