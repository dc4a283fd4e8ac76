"""`choreo pml run`: an answer over encoded modules, and what they save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from choreo_agents.engine import StreamedToken
from choreo_agents.errors import InvalidRequestError
from choreo_agents.lab.timing.prompts import SOURCES, FirstTokenTime, PromptTimer
from choreo_agents.models import LoadedModel
from choreo_agents.pml import Prompt, Schema, compile_schema
from choreo_agents.sampling import Sampling
from choreo_agents.terminal.loading import SMALL_MODEL, USUAL, Loading, load, takes_loading
from choreo_agents.terminal.options import ModelOption, bar, errors_as_lines

_NAMES = {
    "text": "all from text",
    "disk": "modules on disk",
    "host": "modules in host memory",
    "device": "modules on the device",
}
_SMALL = (
    "[dim]So small a model encodes a hundred tokens in the time of ten, less than it takes to put a prompt together: "
    "what is saved here is tokens. A larger one saves time: [b]choreo models random[/b] makes one to measure with.[/]"
)


@takes_loading
def run_prompt(
    schema: Annotated[Path, typer.Argument(help="A schema.")],
    prompt: Annotated[Path, typer.Argument(help="A prompt of it.")],
    model: ModelOption = "embedded",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder", help="Where encoded modules are kept, and found again by the next run; without it, nowhere."
        ),
    ] = None,
    salt: Annotated[
        str,
        typer.Option(
            "--salt",
            envvar="CHOREO_SALT",
            help="With --folder: the secret that its files are sealed with.",
            metavar="TEXT",
        ),
    ] = "",
    speaker: Annotated[str | None, typer.Option("--speaker", help="Who answers, if the model writes names.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of the answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answer.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout and nothing else.")] = False,
    loading: Loading = USUAL,
) -> None:
    """Answer a prompt over encoded modules; then show what that saves.

    The schema is encoded first, as far as no file in --folder has it. Then the prompt is answered once, and the first
    token of its answer timed with the modules in each memory and, for comparison, with everything encoded from text.

    [b]Examples[/b]

      choreo pml run examples/pml/travel.pml examples/pml/travel.prompt.pml
      CHOREO_SALT=... choreo pml run travel.pml question.pml --model path/or/hub-name --folder ~/modules
    """
    console = Console(stderr=as_json, highlight=False)
    with errors_as_lines(console):
        if folder is not None and not salt:
            raise InvalidRequestError(
                "files in --folder are sealed, for other runs, with a secret of yours: put it into CHOREO_SALT, or "
                "give it with --salt"
            )
        read = Schema.from_file(schema)
        asked = read.prompt_file(prompt)
        loaded = load(console, model, loading)
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=0)
        with _timer(console, loaded, read, asked, folder, speaker, max_tokens, salt) as timer:
            answer = _streamed(console, timer, sampling)
            ordinary = timer.from_text(sampling)
            with bar(console) as progress:
                task = progress.add_task("first tokens", total=len(SOURCES) * (repeats + 1))
                found = timer.measure(repeats, lambda: progress.advance(task))
        if as_json:
            typer.echo(json.dumps(_object(read, answer, ordinary, found), indent=2))
            return
        if ordinary != answer:
            console.print(Text.assemble(("read as an ordinary prompt: ", "dim"), ordinary))
        console.print(_table(found, repeats))
        seconds = {each.source: each.seconds for each in found}
        if loaded.adapter.parameters < SMALL_MODEL and seconds["device"] > seconds["text"]:
            console.print(_SMALL)


def _timer(
    console: Console,
    model: LoadedModel,
    schema: Schema,
    prompt: Prompt,
    folder: Path | None,
    speaker: str | None,
    added: int,
    salt: str,
) -> PromptTimer:
    """Under a progress bar: the schema is encoded."""
    total = sum(len(piece.tokens) for piece in compile_schema(schema, model).cached_pieces())
    with bar(console) as progress:
        task = progress.add_task(f"encoding {escape(schema.name)}", total=total)
        return PromptTimer(
            model, schema, prompt, folder, speaker, added, lambda tokens: progress.advance(task, tokens), salt
        )


def _streamed(console: Console, timer: PromptTimer, sampling: Sampling) -> str:
    """The answer, printed as it comes."""
    words = ""
    for each in timer.answer(sampling):
        if isinstance(each, StreamedToken):
            said = each.text if words else each.text.lstrip()
            console.print(Text(said), end="", soft_wrap=True)
            words += said
        else:
            timer.engine.release(each)
    console.print()
    return _bare(timer, words)


def _bare(timer: PromptTimer, words: str) -> str:
    """Words without the special tokens that end a turn."""
    return words.removesuffix(timer.engine.chat.turn_end).strip()


def _table(found: list[FirstTokenTime], repeats: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="before the first token", title_justify="left")
    table.add_column("")
    for column in ("tokens encoded", "from the cache", "ms", "faster"):
        table.add_column(column, justify="right")
    slowest = next(each.seconds for each in found if each.source == "text")
    for each in found:
        faster = "" if each.source == "text" else f"{slowest / each.seconds:.2f}x"
        table.add_row(
            _NAMES[each.source], f"{each.encoded:,}", f"{each.reused:,}", f"{each.seconds * 1e3:,.1f}", faster
        )
    table.caption = f"medians of {repeats}, taken in turn"
    table.caption_justify = "left"
    return table


def _object(schema: Schema, answer: str, ordinary: str, found: list[FirstTokenTime]) -> dict[str, Any]:
    rows = {each.source: {"seconds": each.seconds, "encoded": each.encoded, "reused": each.reused} for each in found}
    return {"schema": schema.name, "answer": answer, "answer_from_text": ordinary, "first_token": rows}
