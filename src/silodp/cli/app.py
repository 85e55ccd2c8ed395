"""The command line. Bad input ends with one sentence and exit code 2, an interrupt with one
sentence and 130. Every command has --json.

A command's module is imported when the command runs. So a gate that serves has loaded neither
simulation nor audit, and help is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import click
import typer

from silodp import __version__
from silodp.cli.console import SETTINGS, LazyGroup, Listed, complain
from silodp.core.errors import BadInput, Refused
from silodp.core.text import visible
from silodp.host.python_path import safe_children

START = "Start"
CHOOSE = "Choose"
DEPLOY = "Deploy"
MOVED = {
    "card": "export card",
    "certify": "audit certify",
    "data": "train --data help",
    "estimate": "stats estimate",
    "evidence": "export evidence",
    "metrics": "ledger metrics",
    "profile": "stats profile",
    "shuffler": "federation shuffler",
    "survival": "stats survival",
}
"""Former names of commands, with the current names."""
SHORT = {"synthesise": "stats synthesise", "table1": "stats table1"}
"""Short names that are not listed, with the whole names."""


@contextmanager
def _visible_errors() -> Iterator[None]:
    """Escape control characters in errors about the command line."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = visible(error.message)
        raise


class Silodp(LazyGroup):
    """All commands, in the order in which a user needs them."""

    def make_context(self, *words: Any, **settings: Any) -> click.Context:
        with _visible_errors():
            return super().make_context(*words, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        with _visible_errors():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing:
            refuse_old_name(args)
        whole = SHORT.get(args[0], args[0]).split()
        return super().resolve_command(ctx, [*whole, *args[1:]])

    listed = (
        Listed(
            START, "project", "init", "Start a project: settings, schema, and the next commands."
        ),
        Listed(START, "train", "train", "Train privately in simulation, all silos in one process."),
        Listed(START, "score", "evaluate", "Score a run's model on held-out records, at a price."),
        Listed(START, "status", "status", "Show the state of a study and the next command."),
        Listed(START, "use", "predict", "Compute risks for new records, at no price."),
        Listed(START, "pages", "report", "Write a report of a run, to read, print and sign."),
        Listed(START, "groups", "export", "Write a model, model card or evidence for others."),
        Listed(START, "pages", "ui", "Show runs, or a silo's gate, in a browser on this machine."),
        Listed(CHOOSE, "plan", "plan", "Compute a run's price before it reads data, or advise."),
        Listed(
            CHOOSE,
            "tune",
            "tune",
            "Find settings: free on public data, at a price on the silos' own.",
        ),
        Listed(
            CHOOSE, "groups", "stats", "Show means and curves of records, or coefficients of a run."
        ),
        Listed(DEPLOY, "silo_officer", "silo", "Make, run and inspect one silo's gate."),
        Listed(
            DEPLOY, "groups", "federation", "Start silos as processes, train over them, stop them."
        ),
        Listed(
            DEPLOY, "groups", "ledger", "Show a data set's budget: queries, spend, and the rest."
        ),
        Listed(DEPLOY, "doctor", "doctor", "Check whether this machine can run silodp."),
        Listed(
            DEPLOY, "audit", "audit", "Attack silodp's code, or other DP code, to test its claims."
        ),
    )


def refuse_old_name(words: list[str]) -> None:
    """Raise BadInput for a former name of a command, with the current name."""
    if words[0] in MOVED:
        raise BadInput(f"`silodp {words[0]}` has a new name; use `silodp {MOVED[words[0]]}`")
    if words[0] == "export" and words[1:]:
        from silodp.cli import groups

        known = [*groups.export.commands, *SETTINGS["help_option_names"]]
        if words[1] not in known:
            raise BadInput(
                f"`silodp export {words[1]}` is not a command; use `silodp export "
                "model`, `silodp export card` or `silodp export evidence`"
            )


app = typer.Typer(
    cls=Silodp,
    help=(
        "Federated learning for people who do not trust the server: every silo's messages are "
        "differentially private for each record."
    ),
    epilog=(
        "Meaning of the words (silo, gate, release, ledger, clip, phase, mu, masks): "
        "docs/glossary.md"
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings=SETTINGS,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"silodp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line. Turn user errors into one sentence and exit code 2."""
    try:
        with safe_children():
            app()
    except BadInput as error:
        complain(error)
        sys.exit(2)
    except Refused as refusal:
        complain(f"the gate refused ({refusal.code})")
        sys.exit(2)
