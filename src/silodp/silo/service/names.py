"""Find names for people, where a ledger has keys and numbers only: who asked, and for which study.

The ledger's chain is not changed. The names are in the policy and in the list of approvals.
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
    """Return the asker's name in the policy of this ledger, or the key's first digits.

    Text that is no key is returned as it is.
    """
    rules = _policy(ledger)
    if rules and asker in rules.askers:
        return rules.called(asker)
    if re.fullmatch("[0-9a-f]{64}", asker):
        return asker[:8]
    return asker


def runs_of(opened: DurableLedger, queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each run that was answered, in the order of its first query.

    Each has its asker, its study, its number of queries and its share of the budget.
    """
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    studies = _studies(opened.path)
    for query in queries:
        run = query["run"]
        asker = query["asker"]
        if (asker, run) not in runs:
            # The policy is read once for each run, and not for each query.
            runs[asker, run] = {
                "run": run,
                "asker": asker,
                "asked_by": called(opened.path, asker),
                "study": "",
                "questions": 0,
                "cost": 0.0,
            }
        row = runs[asker, run]
        row["study"] = next(
            (name for since, name in reversed(studies) if since <= query["time"]), ""
        )
        row["questions"] += 1
        row["cost"] += query["cost"]
    return list(runs.values())


def _studies(ledger: Path) -> list[tuple[str, str]]:
    """Return (start, name) of each study, the oldest first."""
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
    """Return the policy of the silo whose ledger this is, or None.

    It is found where `silodp silo init` puts it.
    """
    from silodp.silo.service.policy import DaemonSettings, Policy

    path = ledger.parent / "policy.toml"
    try:
        if Path(DaemonSettings.load(path).ledger).resolve() != ledger.resolve():
            return None
        return Policy.load(path)
    except BadInput:
        return None
