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
            raise typer.BadParameter(f"{path} has {name!r}, and no option is called that: see --help")
        if getattr(options[name], "multiple", False) and not isinstance(values[name], list):
            values[name] = [values[name]]
    context.default_map = values


def serve(
    model: Annotated[
        str,
        typer.Argument(help="[b]embedded[/b], a folder in Hugging Face's layout, or a hub name.", show_default=False),
    ],
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="What clients call the model; by default as it is named here.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            callback=_configure,
            is_eager=True,
            help='A TOML file of these options by name, as in [b]model = "llama"[/b] and [b]kv-budget = 4[/b]; the '
            "command line overrides it.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="What is written to stderr; info: also a line for each request."),
    ] = "info",
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0: everywhere.", rich_help_panel=_WHERE)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free.", rich_help_panel=_WHERE)] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="A file with [b]KEY TENANT[/b] on each line; by default what CHOREO_KEYS says, with commas between.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The only key; by default what CHOREO_API_KEY says, which no list of processes shows.",
            rich_help_panel=_WHERE,
            show_default=False,
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
    host_budget: Annotated[
        float, typer.Option(min=0, help="Host memory in GiB for KV that leaves it.", rich_help_panel=_ENGINE)
    ] = 0.0,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="A folder for KV that has no room there either; without one it is computed again.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    disk_budget: Annotated[float, typer.Option(min=0.001, help="GiB of files in it.", rich_help_panel=_ENGINE)] = 16.0,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="An adapter, which clients call as a model of that name; may be given several times.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable of the chat template, as [b]enable_thinking=false[/b]; may be given several times.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers in one step at most.", rich_help_panel=_ENGINE)] = 256,
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
            raise ValueError("--record: say with --recordings in which folder")
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
        warning = f"listening on {host} without keys: whoever reaches it may call. Give it --keys or --api-key."
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
            raise ValueError(f"{option} {text!r} must have a name and a value, with = between")
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
