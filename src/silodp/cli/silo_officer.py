"""The commands of a silo's data officer: `silodp silo personalise`, `approve`, `attest`, `key` and
`trust`.

The officer fits a released model to the silo's own records, approves a study, states in public that
the file was checked, and pins the keys of other silos before their noise counts.
"""

from __future__ import annotations

import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli.console import Json, dump, out, say, show, table, tell
from silodp.cli.silo import PolicyFile, silo
from silodp.core.errors import BadInput
from silodp.core.figures import shown, used_of
from silodp.core.local_figures import columns, rows, verdict
from silodp.core.protocol.words import fingerprint
from silodp.core.text import visible
from silodp.host.cards import read_card
from silodp.host.keys import public, read_key
from silodp.host.log import tally
from silodp.host.portable import leave_no_core, running
from silodp.host.tables import read_toml

if TYPE_CHECKING:
    from silodp.silo.service.approve import Proposed

PATIENCE = 600.0
"""Seconds to wait for a gate to restart."""


@silo.command()
def personalise(
    policy: PolicyFile,
    trained: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="The released model: a run's folder, or its file.",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Fit a released model further to this silo's own records, inside the silo. Nothing is sent,
    and nothing is charged.

    The personal model is not private and must never be sent. Cross-validation inside the silo
    decides how near it stays to the shared model: the shared model as it is, only recalibrated,
    pulled towards it, or not used at all. The model and its figures are written into `personal`
    beside the policy, for its owner alone. The figures compare alone, together and personal: on the
    records that the policy holds out, or else by nested cross-validation. `silodp predict` uses the
    model.

    Example: `silodp silo personalise clinic/policy.toml runs/train` and then `silodp predict
    clinic/personal new.csv`
    """
    from silodp.silo.personal import STAYS, words
    from silodp.silo.personal import personalise as made

    found = made(policy, trained)
    if as_json:
        return dump(words(found))
    title = f"{found.scored} records, {found.how}"
    heads = "|".join(f"{name}>" for name in columns([found.table]))
    show(table(f"model|{heads}", rows(found.table), title=title))
    say(verdict(found.table))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.shares.items())
    say(f"Weights in the personal model: {shares}.")
    say(
        f"Wrote {found.path}, fitted to {found.trained} records, for its owner alone. Nothing was "
        "sent, and nothing is charged."
    )
    say(STAYS, style="bold")
    say(f"Use it here: silodp predict {found.path.parent} FILE")


@silo.command()
def approve(
    study: Annotated[
        Path,
        typer.Argument(
            help="The study's file, as `silodp federation propose` made it.", show_default=False
        ),
    ],
    policy: Annotated[
        list[Path],
        typer.Argument(
            help="The silo's policy.toml. With several, the command asks about each.",
            show_default=False,
        ),
    ],
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Approve without a question, in a script that you have read."),
    ] = False,
    by: Annotated[
        str, typer.Option(help="Name of the officer, for the silo's own list of approvals.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Approve another study for the same records. The command prints what changes, asks, and writes
    the policy. The ledger continues.

    From then on the gate answers about this study only. A running gate restarts with it.

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
    answers = [
        _approve(found, answer, by, as_json) for found, answer in asked
    ]  # only now does code of the study run
    if as_json:
        return dump({"study": answers[0]["study"], "silos": answers})
    if not all(answer["approved"] for answer in answers):
        raise typer.Exit(2)


def _ask(found: Proposed, yes: bool, quiet: bool, *, brief: bool) -> dict[str, Any]:
    """Show the officer a change, and return whether it is approved. The study has not run."""
    from silodp.silo.ledger.durable import DurableLedger

    name = found.rules.silo
    opened = DurableLedger.open(Path(found.place.ledger))
    spent = shown(opened.spent())
    answer = {
        "silo": name,
        "study": found.study.study,
        "approved": True,
        "changes": {c.what: [c.before, c.after] for c in found.changes},
        "spent_epsilon": opened.spent(),
        "left": 1 - opened.used(),
        "card": str(found.policy.parent / "silo.json"),
    }
    if found.approved:
        if not quiet:
            say(f"{name} approves {found.study.study} already; nothing was changed.")
        return answer | {"gate": "as it was"}
    if not quiet:
        say(
            f"{name}: "
            + ("the same changes" if brief else f"what the study {found.study.study} would change")
        )
        for change in () if brief else found.changes:
            head = f"  {change.what:<17}"
            out.print(
                textwrap.fill(
                    change.words,
                    min(out.width, 80),
                    initial_indent=head,
                    subsequent_indent=" " * len(head),
                    break_long_words=False,
                )
            )
        for file in found.sources:
            say(f"Its code, {file}, will run in the gate: read it first.")
        say(
            f"The ledger continues: {used_of(opened.used())}, epsilon {spent} of "
            f"{found.rules.epsilon:g}. Approval refreshes nothing."
        )
    if not yes and not typer.confirm(visible(f"Approve it for {name}?")):
        say(f"{name}: nothing was changed.")
        return answer | {"approved": False}
    return answer


def _approve(found: Proposed, answer: dict[str, Any], by: str, quiet: bool) -> dict[str, Any]:
    from silodp.silo.service.approve import approve as approving

    if found.approved or not answer["approved"]:
        return answer
    name = found.rules.silo
    if running(found.place.ledger):
        before = tally(found.place.log)["started"]
    else:
        before = None
    approving(found, by, registry_of(found.policy), tell=(lambda _: None) if quiet else say)
    gate = _taken_up(found, before)
    if not quiet:
        say(f"{name} approves {found.study.study}; {gate}.")
        if found.rules.checked and "schema" in {
            change.what for change in found.changes if change.before != change.after
        }:
            say("The schema is another: run `silodp silo check` again, and `silodp silo attest`.")
    return answer | {"gate": gate}


def _taken_up(found: Proposed, before: int | None) -> str:
    """Wait until a running gate has restarted, and return the outcome in words."""
    if before is None:
        return f"the gate is not running; start it with `silodp silo serve {found.policy}`"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if tally(found.place.log)["started"] > before:
            return "the gate has restarted with it"
        if not running(found.place.ledger):
            time.sleep(1.0)  # between its end and its start nobody serves
            if not running(found.place.ledger) and tally(found.place.log)["started"] <= before:
                return (
                    "the gate has ended and did not restart; "
                    f"`silodp silo serve {found.policy}` prints the reason"
                )
        time.sleep(0.05)
    return "the gate has not restarted yet; start it again"


def registry_of(policy: Path) -> Path | None:
    """Return the registry of ledgers of a federation that `silodp federation up` made from a
    built-in data set, or None for the machine's own.
    """
    from silodp.cli.federation_files import state_in

    silos = policy.parent.parent
    if silos.name == "silos":
        own = (state_in(silos.parent) or {}).get("registry")
    else:
        own = None
    return Path(own) / "ledgers" if own else None


@silo.command()
def attest(
    policy: PolicyFile,
    by: Annotated[
        str,
        typer.Option(help="Who ran `silodp silo check` on the silo's file and read its findings."),
    ],
    on: Annotated[str, typer.Option(help="The day, such as 2026-11-17; today by default.")] = "",
    as_json: Json = False,
) -> None:
    """State in public that the silo's file was checked: by whom and when, never the findings. The
    statement goes into the policy and the card.

    `silodp federation status`, `run` and `silodp status` show it. It is your word: the check itself
    sends and stores nothing.

    Example: `silodp silo attest clinic/policy.toml --by "A. Officer"`
    """
    from silodp.silo.service.approve import attest as attesting

    today = datetime.now(UTC).date()
    try:
        if on:
            day = datetime.fromisoformat(on).date()
        else:
            day = today
    except ValueError:
        day = None
    if day is None or day > today:
        raise BadInput(f"--on is {on!r}; it must be a day that has come, such as {today}")
    if not by.strip():
        raise BadInput("--by is empty; it must be the name of who ran the check")
    words = f"{day} by {by.strip()}"
    rules = attesting(policy, words)
    said = (
        f"{rules.silo}: checked {words}, in policy.toml and silo.json; what was found stays here."
    )
    tell({"silo": rules.silo, "checked": words}, as_json, said)


@silo.command()
def key(policy: PolicyFile, as_json: Json = False) -> None:
    """Print the silo's own key, and its 16 words. Read the words to the officers of the other silos
    over the telephone.

    Example: `silodp silo key clinic/policy.toml`
    """
    from silodp.silo.service.policy import DaemonSettings

    # askers may still be missing
    name = read_toml("policy", policy).get("silo")
    own = public(read_key(DaemonSettings.load(policy).key))
    words = fingerprint(own)
    tell(
        {"silo": name, "key": own, "words": words}, as_json, f"{name}: {own}", f"Its words: {words}"
    )


@silo.command()
def trust(
    policy: PolicyFile,
    other: Annotated[
        Path,
        typer.Argument(help="The other silo's silo.json.", show_default=False),
    ],
    words: Annotated[
        str | None,
        typer.Option(
            help="The 16 words that its officer has read to you. Without them no key is pinned."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Pin another silo's key, so that it may be in a masked total with this one. Compare the 16
    words that its officer reads to you.

    The carrier of silo.json could have replaced the key, and could then read this silo's numbers.
    Only the words show this.

    Example: `silodp silo trust clinic/policy.toml other.json --words "acid acorn ..."`
    """
    from silodp.silo.service.masking import pin
    from silodp.silo.service.policy import DaemonSettings

    card = read_card(other)
    if card.key == public(read_key(DaemonSettings.load(policy).key)):
        raise BadInput(
            f"{other} has the key of this silo itself; give the silo.json of OTHER, a silo "
            "with which it is in a total"
        )
    wanted = fingerprint(card.key)
    if words is not None and words.lower().split() != wanted.split():
        raise BadInput(
            f"these are not the words of the key in {other}; nothing is pinned: ask "
            f"{card.name}'s officer for its silo.json again"
        )
    if words is not None:
        masking = pin(policy, [f"{card.name} {card.key}"])
    else:
        masking = None
    if as_json:
        return dump({"silo": card.name, "key": card.key, "pinned": masking is not None})
    if (
        masking is None
        # the words that the card would need are not shown: whoever copied them here would pin what
        # was brought
    ):
        return say(
            f"{card.name}: {card.key}",
            (
                "Nothing is pinned yet. Call its officer, have the 16 words of `silodp silo "
                "key` read to you, and give them with --words."
            ),
        )
    say(
        f"{card.name} is pinned; {len(masking.members)} other silos may be in a total with "
        "this one. Start the gate again to let it know."
    )
