"""`silodp silo approve` and `silodp silo attest`: what a data officer agrees to, in words, and says for all to see."""

from __future__ import annotations

import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli.console import Json, dump, out, say
from silodp.cli.silo import PolicyFile, silo
from silodp.core.errors import BadInput
from silodp.host.lock import running
from silodp.host.log import tally
from silodp.host.process import leave_no_core

if TYPE_CHECKING:
    from silodp.silo.service.approve import Proposed

PATIENCE = 600.0
"""Seconds that a gate is given to begin anew."""


@silo.command()
def approve(
    study: Annotated[Path, typer.Argument(help="The study's file, as `silodp federation propose` made it.", show_default=False)],
    policy: Annotated[list[Path], typer.Argument(help="The silo's policy.toml; of several, each is asked for.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Agree without being asked, in a script that you have read.")] = False,
    by: Annotated[str, typer.Option(help="Who approves, for the silo's own list of approvals.")] = "",
    as_json: Json = False,
) -> None:
    """Approve another study for the same records: shows in words what changes, asks, and writes the policy. The ledger goes on as it is.

    From then on the gate answers about this study, and no more about the one before. A gate that runs takes it up by itself.

    Example: `silodp silo approve second.toml clinic/policy.toml`
    """
    from silodp.silo.service.approve import compare

    leave_no_core()
    if as_json and not yes:
        raise BadInput("--json asks nothing; give --yes too, once you have read what would change")
    asked: list[tuple[Proposed, dict[str, Any]]] = []
    shown = None
    for found in [compare(path, study) for path in policy]:
        asked.append((found, _ask(found, yes, as_json, brief=found.changes == shown)))
        shown = found.changes
    answers = [_approve(found, answer, by, as_json) for found, answer in asked]  # only now does code of the study run
    if as_json:
        return dump({"study": answers[0]["study"], "silos": answers})
    if not all(answer["approved"] for answer in answers):
        raise typer.Exit(2)


def _ask(found: Proposed, yes: bool, quiet: bool, *, brief: bool) -> dict[str, Any]:
    """What the officer was shown, and whether it is approved; nothing of the study has run."""
    from silodp.core.figures import left_of, shown
    from silodp.silo.ledger.durable import DurableLedger

    name, opened = found.rules.silo, DurableLedger.open(Path(found.place.ledger))
    spent, left = shown(opened.spent()), left_of(opened.used())
    answer = {
        "silo": name, "study": found.study.study, "approved": True, "changes": {c.what: [c.before, c.after] for c in found.changes},
        "spent_epsilon": opened.spent(), "left": 1 - opened.used(), "card": str(found.policy.parent / "silo.json"),
    }  # fmt: skip
    if found.approved:
        if not quiet:
            say(f"{name} approves {found.study.study} already; nothing was changed.")
        return answer | {"gate": "as it was"}
    if not quiet:
        say(f"{name}: " + ("the same changes" if brief else f"what the study {found.study.study} would change"))
        for change in () if brief else found.changes:
            head = f"  {change.what:<17}"
            out.print(
                textwrap.fill(change.words, out.width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)
            )
        for file in found.sources:
            say(f"Its code, {file}, will run in the gate: read it first.")
        say(f"The ledger goes on: epsilon {spent} of {found.rules.epsilon:g} is spent, {left} of the budget is left. Nothing is refreshed.")
    if not yes and not typer.confirm(f"Approve it for {name}?"):
        say(f"{name}: nothing was changed.")
        return answer | {"approved": False}
    return answer


def _approve(found: Proposed, answer: dict[str, Any], by: str, quiet: bool) -> dict[str, Any]:
    from silodp.silo.service.approve import approve as approving

    if found.approved or not answer["approved"]:
        return answer
    name = found.rules.silo
    before = tally(found.place.log)["started"] if running(found.place.ledger) else None
    approving(found, by, registry_of(found.policy))
    gate = _taken_up(found, before)
    if not quiet:
        say(f"{name} approves {found.study.study}; {gate}.")
        if found.rules.checked and "schema" in {change.what for change in found.changes if change.before != change.after}:
            say("The schema is another: run `silodp silo check` again, and `silodp silo attest`.")
    return answer | {"gate": gate}


def _taken_up(found: Proposed, before: int | None) -> str:
    """Waits until a gate that runs has begun anew."""
    if before is None:
        return f"the gate does not run: silodp silo serve {found.policy}"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if tally(found.place.log)["started"] > before:
            return "the gate has taken it up"
        if not running(found.place.ledger):
            time.sleep(1.0)  # between its end and its start nobody serves
            if not running(found.place.ledger) and tally(found.place.log)["started"] <= before:
                return f"the gate has ended and not begun anew: silodp silo serve {found.policy} says why"
        time.sleep(0.05)
    return "the gate has not begun anew yet; start it again"


def registry_of(policy: Path) -> Path | None:
    """The registry of ledgers of a federation that `silodp federation up` made of a built-in set; the machine's own otherwise."""
    from silodp.cli.federation_files import state_in

    silos = policy.parent.parent
    own = (state_in(silos.parent) or {}).get("registry") if silos.name == "silos" else None
    return Path(own) / "ledgers" if own else None


@silo.command()
def attest(
    policy: PolicyFile,
    by: Annotated[str, typer.Option(help="Who ran `silodp silo check` on the silo's file, and looked at what it said.")],
    on: Annotated[str, typer.Option(help="The day, such as 2026-11-17; today by default.")] = "",
    as_json: Json = False,
) -> None:
    """Say for all to see that the silo's file was checked: by whom and when, never what was found. It goes into policy and card.

    `silodp federation status`, `run` and `silodp status` show it. It is your word: the check itself sends and stores nothing.

    Example: `silodp silo attest clinic/policy.toml --by "A. Officer"`
    """
    from silodp.silo.service.approve import attest as attesting

    today = datetime.now(UTC).date()
    try:
        day = datetime.fromisoformat(on).date() if on else today
    except ValueError:
        day = None
    if day is None or day > today:
        raise BadInput(f"--on is {on!r}; it must be a day that has come, such as {today}")
    if not by.strip():
        raise BadInput("--by is empty; it must be the name of who ran the check")
    words = f"{day} by {by.strip()}"
    rules = attesting(policy, words)
    if as_json:
        return dump({"silo": rules.silo, "checked": words})
    say(f"{rules.silo}: checked {words}, in policy.toml and silo.json; what was found stays here.")
