"""What every command prints with: one console, one table, one progress bar, one --json, and groups
that load a command when it runs.

The console reads no markup, since names that come from outside are printed with it: colours are
given as `style`. All that is printed goes through `core/text.py`, so that no name steers a screen.
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
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from silodp.core.text import visible, visible_lines

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
LabelColumn = Annotated[str, typer.Option(help="Column that holds the label.")]
Classes = Annotated[
    str | None,
    typer.Option(help="Public list of classes, such as benign,malignant; 'number' for regression."),
]
AuditFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder, or JSON output, of `silodp audit`; audit.json in the run's folder by default."
    ),
]
FeatureMapName = Annotated[
    str,
    typer.Option(
        help=(
            "What the model sees of a record: photo:M (M numbers of a picture, 256 at most), "
            "digit (of a handwritten digit), or FILE.py:NAME, a "
            "public function of one record; the record itself by default."
        ),
        show_default=False,
    ),
]


class Screen(Console):
    """A console that shows controls in what it prints, and obeys none."""

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(visible_lines(text), **settings)


out = Screen(highlight=False, markup=False, emoji=False, soft_wrap=True)


def dump(answer: Mapping[str, Any]) -> None:
    """What --json prints: one object on one line."""
    print(json.dumps(answer).replace("\x7f", "\\u007f"), flush=True)


def put(text: str) -> None:
    """Print the text of a file on standard output, with its lines as they are."""
    print(visible_lines(text), end="", flush=True)


def complain(sentence: object) -> None:
    """Print one sentence on standard error, after the program's name."""
    print(f"silodp: {visible(sentence)}", file=sys.stderr)


def tell(answer: Mapping[str, Any], as_json: bool, *sentences: str) -> None:
    """The answer for machines, or in words."""
    dump(answer) if as_json else say(*sentences)


def say(*sentences: str, style: str | None = None, wrap: bool = True) -> None:
    """Each sentence on lines of its own: broken between words where somebody reads, and not at all
    for a pipe.

    Commands in `...`, and one that ends the sentence after a colon, stay whole, to be copied; so do
    paths and hashes.
    """
    for sentence in map(visible, sentences):
        out.print(_wrapped(sentence) if wrap and _read() else sentence, style=style)


def item(name: str, words: str) -> None:
    """One line of a list: a name, and beside it what is said of it, in as many lines as that
    takes.
    """
    if len(name) < 15:
        head = f"  {name:<14} "
    else:
        head = f"  {name} "
    text = visible(f"{head}{words}")
    out.print(_wrapped(text, " " * 17) if _read() else text)


def _read() -> bool:
    """Whether a person's screen is known: a terminal, or a width that was asked for, which then
    holds.
    """
    if asked := (columns := os.environ.get("COLUMNS", "")).isdecimal():
        out.width = max(int(columns), 20)
    return out.is_terminal or asked


def _wrapped(sentence: str, indent: str | None = None) -> str:
    if indent is not None:
        margin = indent
    else:
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
    """What the advisor chose, and what to expect."""
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
    """A table for `show`. `columns` are the headings between "|": one that ends in ">" is set flush
    right, and one that ends in "!" never wraps.

    `styles` are those of the rows, in order.
    """
    shown = None if title is None else visible(title)
    if box:
        made = Table(title=shown)
    else:
        made = Table(title=shown, box=None, pad_edge=False)
    for heading in columns.split("|"):
        right = heading.rstrip("!").endswith(">")
        whole = heading.endswith("!")
        made.add_column(
            visible(heading.rstrip(">!")),
            justify="right" if right else "left",
            no_wrap=whole,
            overflow="fold",
        )
    of_rows = iter(styles)
    for row in rows:
        made.add_row(
            *(cell if isinstance(cell, Text) else visible(cell) for cell in row),
            style=next(of_rows, None),
        )
    return made


def show(*tables: Table) -> None:
    """Each table, or the list of its rows where the screen is so narrow that words would be
    broken.
    """
    _read()
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
    """A bar on standard output, from the first call on; call what it gives with (done, total) and,
    if there is more to say, `said`.
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
            if not bar.live.is_started and not quiet:  # what is refused before has no bar
                shown.enter_context(bar)
            bar.update(
                task,
                completed=done if total is None else min(done, total),
                total=total,
                said=visible(said),
            )

        yield tick


# --- commands that load when they run ------------------------------------------------------------


SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


def group(says: str) -> typer.Typer:
    """A group of commands, such as `silodp silo`."""
    return typer.Typer(
        help=says,
        no_args_is_help=True,
        add_completion=False,
        context_settings=SETTINGS,
        rich_markup_mode="markdown",
    )


@dataclass(frozen=True)
class Listed:
    """A command that is known by its line of help, and loaded when it runs.

    `place` is the module of silodp.cli, with ":FUNCTION" where the function is not named as the
    command.
    """

    panel: str
    place: str
    name: str
    says: str

    def listing(self) -> click.Command:
        return TyperCommand(self.name, short_help=self.says, rich_help_panel=self.panel)

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
        command.short_help = self.says
        return command

    def _made(self, found: Any) -> click.Command:
        """Make a click command of a typer group or of a plain function."""
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(
            add_completion=False, context_settings=SETTINGS, rich_markup_mode="markdown"
        )
        alone.command(self.name)(found)
        return typer.main.get_command(alone)


class Commands(UserDict[str, Any]):
    """Commands by name, each loaded when it is asked for; `data` has them as they are, loaded or
    not.
    """

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(self.data[name], Listed):
            self.data[name] = self.data[name].load()
        return self.data[name]


class LazyGroup(TyperGroup):
    """A group whose help and completion list its commands without loading any.

    A subclass names its commands in `listed`, and an instance can be given others.
    """

    listed: tuple[Listed, ...] = ()

    def __init__(self, *, listed: tuple[Listed, ...] = (), **settings: Any) -> None:
        super().__init__(**settings)
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


def lazy_group(says: str, *listed: Listed) -> LazyGroup:
    """Make a group of commands that load one by one, such as `silodp ledger`."""
    return LazyGroup(
        listed=listed,
        help=says,
        no_args_is_help=True,
        context_settings=SETTINGS,
        rich_markup_mode="markdown",
    )
