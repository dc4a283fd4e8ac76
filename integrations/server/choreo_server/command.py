"""`choreo serve`: a model for every program that speaks OpenAI's protocol."""

from __future__ import annotations

import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

_TURN_S = 0.0005
"""Seconds for which what is said to clients may keep the engine's thread from its next operation."""
_WHERE, _LIMITS, _ENGINE = "Who may call, and where", "Limits", "The engine"


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
            help="A file with [b]KEY TENANT[/b] on each line; by default what CHOREO_KEYS says, with commas between.",
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
    typer.echo("loading torch and LangGraph ...", err=True)
    import uvicorn

    from choreo_agents import Memory, Scheduling
    from choreo_agents.errors import ChoreoError
    from choreo_server.app import server_app
    from choreo_server.limits import Limits
    from choreo_server.process import StoppingServer, load_engine
    from choreo_server.tenancy import read_keys

    try:
        if record and recordings is None:
            raise ValueError("--record: say with --recordings in which folder")
        known = read_keys(keys)
        limits = Limits(
            body_bytes=round(max_body_mb * (1 << 20)),
            messages=max_messages,
            request_s=request_timeout or None,
            answers=max_answers,
            tenant_answers=tenant_answers,
            tenant_calls_per_second=tenant_calls_per_second,
        )
        memory = Memory(kv_budget_bytes=None if kv_budget is None else round(kv_budget * (1 << 30)))
        options = {"device": device, "memory": memory, "scheduling": Scheduling(rows=rows)}
        typer.echo(f"loading {model} ...", err=True)
        engine = load_engine(model, engines, threads, dtype, options)
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
        StoppingServer(config, app).run()
    finally:
        engine.close()
    typer.echo("stopped", err=True)


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
