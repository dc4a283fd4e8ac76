"""`choreo serve`: serves a model with OpenAI's protocol."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

_GIB = 1 << 30
_TURN_S = 0.0005
"""Switch interval of Python's threads, in seconds: bounds how long the HTTP thread delays the engine's thread."""
_WHERE, _LIMITS, _ENGINE = "Who may call, and where", "Limits", "The engine"


def _configure(context: typer.Context, path: Path | None) -> None:
    """Read options from a file; the command line overrides them."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text())
    except ValueError as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    values = {name.replace("-", "_"): value for name, value in values.items()}
    options = {option.name: option for option in context.command.params if option.name not in ("help", "config")}
    for name in values:
        if name not in options:
            raise typer.BadParameter(f"{path} has an unknown option {name!r}: see --help")
        if getattr(options[name], "multiple", False) and not isinstance(values[name], list):
            values[name] = [values[name]]
    context.default_map = values


def serve(
    model: Annotated[
        str,
        typer.Argument(help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name.", show_default=False),
    ],
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Name of the model for clients; by default as it is passed here.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            callback=_configure,
            is_eager=True,
            help='A TOML file with these options by name, such as [b]model = "llama"[/b] and [b]kv-budget = 4[/b]; the '
            "command line overrides it.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Level of the log on stderr; info: also a line for each request."),
    ] = "info",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0: all.", rich_help_panel=_WHERE)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.", rich_help_panel=_WHERE)] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="A file with [b]KEY TENANT[/b] on each line; by default CHOREO_KEYS, separated by commas.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The only key; by default CHOREO_API_KEY, which is hidden from process lists.",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
    called: Annotated[
        list[str] | None,
        typer.Option(
            help="A host name for calls without keys, besides its address and [b]localhost[/b]; repeatable.",
            rich_help_panel=_WHERE,
            show_default=False,
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="In MB, per request.", rich_help_panel=_LIMITS)] = 4.0,
    max_messages: Annotated[int, typer.Option(min=1, help="Per request.", rich_help_panel=_LIMITS)] = 4096,
    max_answers: Annotated[
        int, typer.Option(min=1, help="Most answers in progress or waiting, of all tenants.", rich_help_panel=_LIMITS)
    ] = 256,
    tenant_answers: Annotated[
        int | None, typer.Option(min=1, help="The same, for one tenant.", rich_help_panel=_LIMITS, show_default=False)
    ] = None,
    tenant_calls_per_second: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Most messages and answers of one tenant that start per second; the others wait.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds for an answer; 0: no limit.", rich_help_panel=_LIMITS)
    ] = 600.0,
    stop_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds for answers in progress when the server stops.", rich_help_panel=_LIMITS)
    ] = 60,
    kv_budget: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="KV memory in GiB; by default half of the free memory.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    host_budget: Annotated[
        float, typer.Option(min=0, help="Host memory in GiB for KV that is evicted.", rich_help_panel=_ENGINE)
    ] = 0.0,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="A folder for KV that fits into neither; without one it is computed again.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    disk_budget: Annotated[float, typer.Option(min=0.001, help="Most GiB in --disk.", rich_help_panel=_ENGINE)] = 16.0,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="An adapter, which clients call as a model of that name; repeatable.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable of the chat template, such as [b]enable_thinking=false[/b]; repeatable.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Most answers in one step.", rich_help_panel=_ENGINE)] = 256,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, ...; auto: the GPU if there is one.", rich_help_panel=_ENGINE)
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(help="Of weights and KV: bfloat16, ...; auto: the checkpoint's own.", rich_help_panel=_ENGINE),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPU threads; by default one for each core, or with --engines one for each engine.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    recordings: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A folder of recordings, whose pages are at [b]/inspect[/b]: each tenant sees those in the folder of "
            "its name.",
            show_default=False,
        ),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Record each answer there: its text, what it read and its cost, in at most 16 files of 8 MiB for each "
            "tenant.",
        ),
    ] = False,
    engines: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of engines. Several are Ray actors, on this machine or on the cluster in RAY_ADDRESS (needs "
            "[b]choreo-ray[/b]), each with its own GPU if any. --kv-budget, --rows and --threads apply to each.",
            rich_help_panel=_ENGINE,
        ),
    ] = 1,
) -> None:
    """Serve a model to every program that speaks OpenAI's protocol.

    Chat completions with streams, tools, JSON schemas, log-probabilities and [b]n[/b] at
    [b]http://127.0.0.1:8000/v1[/b], and [b]/health[/b] and [b]/metrics[/b]. Requests reuse KV of earlier requests, and
    share the batches of one engine, or of [b]--engines[/b].

    [b]Without keys[/b] everybody who can reach the port may call, so by default it listens on this machine only. With
    keys each belongs to a tenant, and tenants are isolated from each other. The tenant [b]operator[/b] sees the metrics
    of all.

    SIGTERM stops it gracefully: new requests are rejected, and answers in progress end.

    [b]Examples[/b]

      choreo serve HuggingFaceTB/SmolLM2-135M-Instruct
      choreo serve ./llama --model-name llama --port 9000 --kv-budget 4
      choreo serve ./llama --host 0.0.0.0 --keys keys.txt --tenant-answers 16
      choreo serve ./llama --keys keys.txt --recordings recordings --record
      choreo serve ./llama --adapter polite=./polite --host-budget 16
      choreo serve ./llama --engines 4
      choreo serve --config serve.toml
    """
    typer.echo("loading torch and LangGraph ...", err=True)
    import uvicorn

    from choreo_agents import Memory, Scheduling
    from choreo_server.app import server_app
    from choreo_server.limits import Limits
    from choreo_server.process import StoppingServer, load_engine, log_to_stderr, require_free
    from choreo_server.tenancy import read_keys

    log_to_stderr(log_level)
    with _errors_as_lines():
        if record and recordings is None:
            raise ValueError("--record requires a folder: pass --recordings")
        tenant_keys = read_keys(keys, api_key)
        adapters = {name: _adapter_folder(name, text) for name, text in _parse_pairs("--adapter", adapter)}
        variables = {name: _variable(value) for name, value in _parse_pairs("--chat", chat)}
        require_free(host, port)
        limits = Limits(
            body_bytes=round(max_body_mb * (1 << 20)),
            messages=max_messages,
            request_s=request_timeout or None,
            answers=max_answers,
            tenant_answers=tenant_answers,
            tenant_calls_per_second=tenant_calls_per_second,
        )
        memory = Memory(
            kv_budget_bytes=None if kv_budget is None else round(kv_budget * _GIB),
            host_bytes=round(host_budget * _GIB),
            disk=disk,
            disk_bytes=round(disk_budget * _GIB),
        )
        scheduling = Scheduling(max_num_seqs=rows)
        options = {"device": device, "memory": memory, "scheduling": scheduling, "chat": variables or None}
        typer.echo(f"loading {model} ...", err=True)
        engine = load_engine(model, engines, threads, dtype, options)
    if not tenant_keys and not _is_local(host):
        warning = f"listening on {host} without keys: everybody who reaches it may call. Pass --keys or --api-key."
        typer.secho(f"warning: {warning}", err=True, fg="yellow")
    with engine:
        with _errors_as_lines():
            app = server_app(
                engine,
                name=model_name or Path(model).name,
                keys=tenant_keys,
                limits=limits,
                called=called or (),
                recordings=recordings,
                records=record,
                adapters=adapters,
            )
        sys.setswitchinterval(_TURN_S)
        served = uvicorn.Config(
            app,
            host=host,
            port=port,
            timeout_graceful_shutdown=stop_timeout,
            access_log=False,
            server_header=False,
            log_config=None,
            log_level=log_level,
        )
        StoppingServer(served, app).run()
    typer.echo("stopped", err=True)


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    from choreo_agents.errors import ChoreoError

    try:
        yield
    except (ChoreoError, OSError, ValueError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from None


def _adapter_folder(name: str, text: str) -> Path:
    if not Path(text).is_dir():
        raise ValueError(f"--adapter {name}={text}: there is no such folder")
    return Path(text)


def _parse_pairs(option: str, texts: Iterable[str] | None) -> Iterable[tuple[str, str]]:
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise ValueError(f"{option} {text!r} must be a name and a value, joined by =")
        yield name, value


def _variable(value: str) -> Any:
    """Parse the value of a chat template's variable as JSON; what is no JSON is text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
