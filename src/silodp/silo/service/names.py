"""Names for people: who asked, and for which study, where a ledger has keys and numbers alone.

The ledger's chain is not touched: names stand in the policy and in the list of approvals beside it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput

if TYPE_CHECKING:
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.service.policy import Policy


def called(ledger: Path, asker: str) -> str:
    """What the policy beside the ledger calls the asker; else the key's first digits, or the word
    itself where it is no key.
    """
    rules = _policy(ledger)
    if rules and asker in rules.askers:
        return rules.called(asker)
    if re.fullmatch("[0-9a-f]{64}", asker):
        return asker[:8]
    return asker


def runs_of(opened: DurableLedger, queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each run that was answered, in the order of its first question: who asked, for which study,
    how often, and its share of the budget.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    studies = _studies(opened.path)
    for query in queries:
        run = query["run"]
        asker = query["asker"]
        if (
            row := found.get((asker, run))
        ) is None:  # the policy is read for each run, and not for each question
            who = called(opened.path, asker)
            row = found[asker, run] = {
                "run": run,
                "asker": asker,
                "asked_by": who,
                "study": "",
                "questions": 0,
                "cost": 0.0,
            }
        row["study"] = next(
            (name for since, name in reversed(studies) if since <= query["time"]), ""
        )
        row["questions"] += 1
        row["cost"] += query["cost"]
    return list(found.values())


def _studies(ledger: Path) -> list[tuple[str, str]]:
    """(from when on, the study's name), the oldest first."""
    from silodp.silo.service.approve import approvals

    rules = _policy(ledger)
    if rules is None:
        return []
    listed = approvals(ledger.parent / "policy.toml")
    if listed:
        first = listed[0]["before"]["study"]
    else:
        first = rules.study
    return [("", first), *((row["time"], row["study"]) for row in listed)]


def _policy(ledger: Path) -> Policy | None:
    """The policy of the silo whose ledger this is, where `silodp silo init` has put it."""
    from silodp.silo.service.policy import DaemonSettings, Policy

    path = ledger.parent / "policy.toml"
    try:
        own = Path(DaemonSettings.load(path).ledger).resolve() == ledger.resolve()
        return Policy.load(path) if own else None
    except BadInput:
        return None
