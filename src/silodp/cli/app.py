"""The command line. Bad input gets one sentence and exit code 2, an interrupt one and 130; every
command has --json for machines.

A command's module is imported when the command runs. So a gate that serves has loaded neither
simulation nor audit, and help is quick.
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
"""Former names of commands, and today's."""


@contextmanager
def _visible_errors() -> Iterator[None]:
    """Have errors about the command line quote its words visibly."""
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
        return super().resolve_command(ctx, args)

    listed = (
        Listed(
            START, "project", "init", "Start a project: settings, schema, and the next commands."
        ),
        Listed(START, "train", "train", "Train privately in simulation, all silos in one process."),
        Listed(START, "score", "evaluate", "Score a run's model on held-out records, at a price."),
        Listed(START, "status", "status", "Where a study stands, and what the next command is."),
        Listed(START, "use", "predict", "Risks for new records by a trained model, at no price."),
        Listed(START, "pages", "report", "Write one page about a run, to read, print and sign."),
        Listed(START, "groups", "export", "Write a model, model card or evidence for others."),
        Listed(
            START, "pages", "ui", "Look at runs, or a silo's gate, in a browser on this machine."
        ),
        Listed(CHOOSE, "plan", "plan", "Compute a run's price before it reads data, or advise."),
        Listed(
            CHOOSE, "tune", "tune", "Find settings: free on public data, priced on the silos' own."
        ),
        Listed(CHOOSE, "groups", "stats", "Means and curves of records, coefficients of a run."),
        Listed(DEPLOY, "silo_officer", "silo", "One silo's gate: make it, run it, look at it."),
        Listed(DEPLOY, "groups", "federation", "Silos as processes: start, train over, stop."),
        Listed(DEPLOY, "groups", "ledger", "A data set's budget: what was asked, what is left."),
        Listed(DEPLOY, "doctor", "doctor", "Check whether this machine can run silodp."),
        Listed(DEPLOY, "audit", "audit", "Attack the code that users run, or somebody's DP code."),
    )


def refuse_old_name(words: list[str]) -> None:
    """Refuse a name that a command had before, in a sentence that names the new one."""
    if words[0] in MOVED:
        raise BadInput(f"`silodp {words[0]}` has a new name; use `silodp {MOVED[words[0]]}`")
    if words[0] == "export" and words[1:]:
        from silodp.cli import groups

        known = [*groups.export.commands, *SETTINGS["help_option_names"]]
        if words[1] not in known:
            raise BadInput(
                f"`silodp export {words[1]}` is no command; use `silodp export model`, "
                "`silodp export card` or `silodp export evidence`"
            )


app = typer.Typer(
    cls=Silodp,
    help=(
        "Federated learning for people who do not trust the server: every silo's messages are "
        "differentially private for each record."
    ),
    epilog=(
        "What the words mean (silo, gate, release, ledger, clip, phase, mu, masks): "
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
    """Entry point: turns what a user may have got wrong into one sentence and exit code 2."""
    try:
        with safe_children():
            app()
    except BadInput as error:
        complain(error)
        sys.exit(2)
    except Refused as refusal:
        complain(f"the gate refused ({refusal.code})")
        sys.exit(2)
