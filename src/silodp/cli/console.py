"""The output of every command: one console, one table, one progress bar, one --json. Also groups
that load a command when it runs.

The console reads no markup, because it prints names that come from outside. Colours are given as
`style`. All output goes through `core/text.py`, so that no name controls a screen.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from silodp.core.text import visible, visible_lines

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
LabelColumn = Annotated[str, typer.Option(help="The label column.")]
Classes = Annotated[
    str | None,
    typer.Option(
        help="Public list of classes, such as benign,malignant, or 'number' for regression."
    ),
]
AuditFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder, or JSON output, of `silodp audit`; audit.json in the run's folder by default."
    ),
]
Statistics = Annotated[
    Path | None,
    typer.Option(help="Folder of `silodp stats ... --record`, whose answers are shown too."),
]
FeatureMapName = Annotated[
    str,
    typer.Option(
        help=(
            "Public function that turns a record into the model's input: photo:M (M "
            "numbers of a picture, at most 256), digit (for a handwritten digit), or "
            "FILE.py:NAME. By default the record itself."
        ),
        show_default=False,
    ),
]


class Screen(Console):
    """A console that prints control characters visibly and never obeys them."""

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(visible_lines(text), **settings)


out = Screen(highlight=False, markup=False, emoji=False, soft_wrap=True)


def dump(answer: Mapping[str, Any]) -> None:
    """Print the answer as one JSON object on one line."""
    print(json.dumps(answer).replace("\x7f", "\\u007f"), flush=True)


def put(text: str) -> None:
    """Print the text of a file on standard output, with its lines as they are."""
    print(visible_lines(text), end="", flush=True)


def complain(sentence: object) -> None:
    """Print one sentence on standard error, after the program's name."""
    print(f"silodp: {visible(sentence)}", file=sys.stderr)


def tell(answer: Mapping[str, Any], as_json: bool, *sentences: str) -> None:
    """Print the answer as JSON, or the sentences."""
    if as_json:
        dump(answer)
    else:
        say(*sentences)


def say(*sentences: str, style: str | None = None, wrap: bool = True) -> None:
    """Print each sentence on its own lines: wrapped for a terminal, unwrapped for a pipe.

    Commands in `...`, paths and hashes stay whole, so that they can be copied. So does a command
    after a colon at the end of a sentence.
    """
    for sentence in map(visible, sentences):
        if wrap and _has_width():
            sentence = _wrapped(sentence)
        out.print(sentence, style=style)


def item(name: str, words: str) -> None:
    """Print one entry of a list: a name, and its words beside the name on as many lines as
    needed.
    """
    if len(name) < 15:
        head = f"  {name:<14} "
    else:
        head = f"  {name} "
    text = visible(f"{head}{words}")
    if _has_width():
        text = _wrapped(text, " " * 17)
    out.print(text)


def _has_width() -> bool:
    """Return whether the width of the screen is known, from a terminal or from COLUMNS. COLUMNS
    wins.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal():
        out.width = max(int(columns), 20)
        return True
    return out.is_terminal


def _wrapped(sentence: str, indent: str | None = None) -> str:
    margin = indent
    if margin is None:
        margin = sentence[: len(sentence) - len(sentence.lstrip())]
    text, colon, command = sentence.partition(": silodp ")
    if not command or "`" in command or len(sentence) <= out.width:
        text = sentence
        colon = ""
        command = ""
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), text)
    filled = textwrap.fill(
        whole,
        out.width,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    ).replace("\0", " ")
    if colon:
        return f"{filled}:\n{margin}  silodp {command}"
    return filled


def say_advice(advice: Any) -> None:
    """Print what the advisor chose, and the expected error."""
    from silodp.server.advice.words import lines

    say(*lines(advice))


def table(
    columns: str,
    rows: Iterable[Iterable[Any]],
    *,
    title: str | None = None,
    box: bool = True,
    styles: Iterable[str | None] = (),
) -> Table:
    """Return a table for `show`.

    `columns` are the headings, separated by "|". A heading that ends in ">" is aligned right, and
    one that ends in "!" never wraps. `styles` are the styles of the rows, in order.
    """
    if title is not None:
        title = visible(title)
    if box:
        result = Table(title=title)
    else:
        result = Table(title=title, box=None, pad_edge=False)
    for heading in columns.split("|"):
        justify: JustifyMethod = "left"
        if heading.rstrip("!").endswith(">"):
            justify = "right"
        whole = heading.endswith("!")
        name = visible(heading.rstrip(">!"))
        result.add_column(name, justify=justify, no_wrap=whole, overflow="fold")
    of_rows = iter(styles)
    for row in rows:
        result.add_row(*map(_cell, row), style=next(of_rows, None))
    return result


def _cell(value: Any) -> Text | str:
    if isinstance(value, Text):
        return value
    return visible(value)


def show(*tables: Table) -> None:
    """Print each table. Print the list of its rows if the screen is too narrow for its words."""
    _has_width()
    for one in tables:
        if Measurement.get(out, out.options.update(width=10_000), one).minimum <= out.width:
            out.print(one, soft_wrap=False)
            continue
        if one.title:
            say(str(one.title))
        headings = [str(column.header) for column in one.columns]
        columns = [list(column.cells) for column in one.columns]
        for first, *rest in zip(*columns, strict=True):
            out.print(f"{headings[0]} {first}")
            for heading, cell in zip(headings[1:], rest, strict=True):
                item(heading, str(cell))


@contextmanager
def progress(words: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar on standard output from the first call on.

    Yield a function to call with (done, total) and, for a remark, `said`.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[said]}", markup=False),
    )
    with ExitStack() as shown:
        bar = Progress(*columns, disable=quiet, console=out)
        task = bar.add_task(visible(words), total=None, said="")

        def tick(done: int, total: int | None = None, said: str = "") -> None:
            if not bar.live.is_started and not quiet:  # a refused command shows no bar
                shown.enter_context(bar)
            if total is not None:
                done = min(done, total)
            bar.update(task, completed=done, total=total, said=visible(said))

        yield tick


# --- commands that load when they run ------------------------------------------------------------


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


def group(summary: str) -> typer.Typer:
    """Return a group of commands, such as `silodp silo`."""
    return typer.Typer(
        help=summary,
        no_args_is_help=True,
        add_completion=False,
        context_settings=SETTINGS,
        rich_markup_mode="markdown",
    )


@dataclass(frozen=True)
class Listed:
    """A command that is listed by its line of help, and loaded when it runs.

    `place` is the module of silodp.cli, with ":FUNCTION" where the function's name differs from the
    command's.
    """

    panel: str
    place: str
    name: str
    summary: str

    def listing(self) -> click.Command:
        return TyperCommand(self.name, short_help=self.summary, rich_help_panel=self.panel)

    def load(self) -> click.Command:
        module, _, function = self.place.partition(":")
        found = getattr(
            import_module(f"silodp.cli.{module}"), function or self.name.replace("-", "_")
        )
        if isinstance(found, click.Command):
            command = found
        else:
            command = self._made(found)
        command.name = self.name
        command.short_help = self.summary
        return command

    def _made(self, found: Any) -> click.Command:
        """Turn a typer group or a plain function into a click command."""
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(
            add_completion=False, context_settings=SETTINGS, rich_markup_mode="markdown"
        )
        alone.command(self.name)(found)
        return typer.main.get_command(alone)


class Commands(UserDict[str, Any]):
    """Commands by name, each loaded at its first use. `data` has them as they are, loaded or
    not.
    """

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(self.data[name], Listed):
            self.data[name] = self.data[name].load()
        return self.data[name]


class LazyGroup(TyperGroup):
    """A group whose help and completion list its commands without loading any.

    A subclass names its commands in `listed`. An instance can be given others.
    """

    listed: tuple[Listed, ...] = ()

    def __init__(self, *, listed: tuple[Listed, ...] = (), **settings: Any) -> None:
        super().__init__(**settings)
        # Click suggests a similar name already; typer would repeat it.
        self.suggest_commands = False
        self.listed = listed or self.listed
        self._known = Commands(
            {command.name: command for command in self.listed} | dict(self.commands)
        )
        self.commands = self._known
        self._listing = False

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = self._known.data.get(cmd_name)
        if self._listing and isinstance(known, Listed):
            return known.listing()
        return self.commands.get(cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with self._names_only():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        with self._names_only():
            return super().shell_complete(ctx, incomplete)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    @contextmanager
    def _names_only(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


def lazy_group(summary: str, *listed: Listed) -> LazyGroup:
    """Make a group of commands that load one by one, such as `silodp ledger`."""
    return LazyGroup(
        listed=listed,
        help=summary,
        no_args_is_help=True,
        context_settings=SETTINGS,
        rich_markup_mode="markdown",
    )
