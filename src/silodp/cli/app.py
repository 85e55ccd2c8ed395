"""The command line. Bad input gets one sentence and exit code 2, an interrupt one and 130; every command has --json for machines."""

from __future__ import annotations

import sys

import typer

from silodp.cli import choose, studies
from silodp.cli.audit import audit
from silodp.cli.doctor import doctor
from silodp.cli.federation import federation
from silodp.cli.ledger import ledger
from silodp.cli.pages import report, ui
from silodp.cli.plan import plan
from silodp.cli.project import init
from silodp.cli.score import evaluate, profile
from silodp.cli.shuffler import shuffler
from silodp.cli.silo import silo as silo_commands
from silodp.cli.train import train
from silodp.core.errors import BadInput, Refused

app = typer.Typer(
    help="Federated learning for people who do not trust the server: every silo's messages are differentially private for each record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(ledger, name="ledger")
app.add_typer(silo_commands, name="silo")
app.add_typer(federation, name="federation")
app.add_typer(shuffler, name="shuffler")
app.command()(audit)
app.command()(choose.tune)
app.command()(doctor)
app.command()(init)
app.command()(evaluate)
app.command()(profile)
app.command()(report)
app.command()(ui)
app.command()(studies.compare)
app.command()(studies.reproduce)
app.command()(studies.gallery)
app.command()(plan)
app.command()(train)
app.command()(studies.data)
app.command()(studies.rates)


def main() -> None:
    """Entry point: turns what a user may have got wrong into one sentence and exit code 2."""
    try:
        app()
    except BadInput as error:
        print(f"silodp: {error}", file=sys.stderr)
        sys.exit(2)
    except Refused as refusal:
        print(f"silodp: the gate refused ({refusal.code})", file=sys.stderr)
        sys.exit(2)
