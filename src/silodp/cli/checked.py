"""Compare the ledgers on this machine with the heads that a federation's run received from its
silos.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput
from silodp.pages.checked import DIFFERS, NOT_HERE, PARTLY, VERIFIED, Checked

if TYPE_CHECKING:
    from silodp.pages.runs import Run, Silo

HOW = (
    "at a silo, `silodp ledger export LEDGER` prints each released head, to compare "
    "with this page's last table."
)


def ledgers(run: Run) -> list[Checked]:
    """Check the ledgers of a run over silos. Return the results for its page.

    Each ledger must be whole and contain the entry whose hash came with the silo's last answer.
    """
    answered = [s for s in run.silos if s.ledger]
    if run.kind != "federation" or not answered:
        return []
    here = 0
    wrong = []
    policies = _policies(run.folder)
    for s in answered:
        if (path := _ledger(policies.get(s.name))) is None:
            continue
        here += 1
        if why := _differs(path, s):
            wrong.append(f"{s.name}: {why}")
    if wrong:
        return [
            Checked(
                DIFFERS,
                (
                    f"Ledger heads of {here - len(wrong)} of {len(answered)} silos match. "
                    f"{'. '.join(wrong)}."
                ),
            )
        ]
    if not here:
        return [Checked(NOT_HERE, f"The silos' ledgers are not on this machine: {HOW}")]
    words = (
        f"Ledger heads of {here} of {len(answered)} silos match. Each ledger on this machine is "
        "whole, and has the entry whose hash came with the silo's last answer."
    )
    if here == len(answered):
        return [Checked(VERIFIED, words)]
    others = len(answered) - here
    words += f" The ledgers of the other {others} are not on this machine: {HOW}"
    return [Checked(PARTLY, words)]


def archived(run: Run) -> list[Checked]:
    """Return the results of the checks for a page that is read elsewhere. Leave out what could not
    be checked.
    """
    found = [one for one in ledgers(run) if one.state != NOT_HERE]
    return [
        replace(one, words=f"Where this was made: {one.words.replace('on this machine', 'there')}")
        for one in found
    ]


def _differs(path: Path, silo: Silo) -> str:
    """Return what is wrong with a silo's ledger, or "". Nothing is written or updated."""
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.ledger.file import LedgerFile

    head: dict[str, Any] = silo.ledger or {}
    ledger = DurableLedger(LedgerFile(path, None))
    try:
        ledger.verify()
        heads = [released for _, released in ledger.released_heads()]
        if 0 < head["count"] < len(heads):
            found = heads[head["count"]]
        else:
            found = ""
        # Releases of an earlier version have the whole chain's count and head.
        whole = {entry.sequence: entry.hash for entry in ledger.entries()}
    except BadInput:
        return "its ledger does not verify; `silodp ledger verify` prints the reason"
    if head["head"] in (found, whole.get(head["count"])):
        return ""
    if found:
        return f"entry {head['count']} of its ledger is not the one that the run received"
    return f"its ledger has no entry {head['count']}, which the run received"


def _ledger(policy: Path | None) -> Path | None:
    from silodp.silo.service.policy import DaemonSettings

    try:
        if policy:
            path = Path(DaemonSettings.load(policy).ledger)
            if path.is_file() and os.access(path, os.R_OK):
                return path
    except (BadInput, OSError):
        pass
    return None


def _policies(run: Path) -> dict[str, Path]:
    """Return the silos' policies by name, from the federation's folder that contains the run.

    For a run among peers they are found from the silo's folder.
    """
    from silodp.cli.federation_files import state_in

    for folder in run.resolve().parents[1:3]:
        with contextlib.suppress(BadInput):
            if isinstance(silos := (state_in(folder) or {}).get("silos"), dict):
                return {silo: Path(str(policy)) for silo, policy in silos.items()}
    return {}
