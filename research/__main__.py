"""`python -m research COMMAND`: each figure and table of the docs by one command."""

from __future__ import annotations

import sys

import typer

from research import commands
from research.board.command import board
from silodp.cli.console import SETTINGS
from silodp.core.errors import BadInput

app = typer.Typer(
    help="Carry out the studies whose results are in docs/, in a checkout of the sources.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=SETTINGS,
)
for command in (
    commands.compare,
    commands.figures,
    commands.verdict,
    commands.rates,
    commands.coverage,
    commands.gallery,
    commands.one_shot,
    commands.synthetic,
    commands.ratios,
    board,
):
    app.command()(command)


def main() -> None:
    """Run a command. Bad input gets one sentence and exit code 2."""
    try:
        app()
    except BadInput as error:
        print(f"research: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
