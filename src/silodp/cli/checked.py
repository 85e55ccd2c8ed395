"""Whether the ledgers that lie on this machine hold what a federation's run was told by its
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
    "`silodp ledger export LEDGER` at a silo has each released head, to compare with this "
    "page's last table."
)


def ledgers(run: Run) -> list[Checked]:
    """Of a run over silos: whether each ledger is whole and has the very entry whose hash came with
    the silo's last answer.
    """
    told = [s for s in run.silos if s.ledger]
    if run.kind != "federation" or not told:
        return []
    here = 0
    wrong = []
    policies = _policies(run.folder)
    for s in told:
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
                    f"Ledger heads of {here - len(wrong)} of {len(told)} silos match. "
                    f"{'. '.join(wrong)}."
                ),
            )
        ]
    if not here:
        return [Checked(NOT_HERE, f"The silos' ledgers are not on this machine: {HOW}")]
    if here == len(told):
        rest = ""
    else:
        rest = f" The ledgers of the other {len(told) - here} are not on this machine: {HOW}"
    whole = (
        "Each ledger on this machine is whole, and has the entry whose hash came with the "
        "silo's last answer."
    )
    return [
        Checked(
            PARTLY if rest else VERIFIED,
            f"Ledger heads of {here} of {len(told)} silos match. {whole}{rest}",
        )
    ]


def archived(run: Run) -> list[Checked]:
    """The same for a page that others read elsewhere: what was checked where it was made, and
    nothing of what could not be.
    """
    found = [one for one in ledgers(run) if one.state != NOT_HERE]
    return [
        replace(one, words=f"Where this was made: {one.words.replace('on this machine', 'there')}")
        for one in found
    ]


def _differs(path: Path, silo: Silo) -> str:
    """What is wrong with a silo's ledger; nothing is written, and nothing brought up to date."""
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.ledger.file import LedgerFile

    said: dict[str, Any] = silo.ledger or {}
    ledger = DurableLedger(LedgerFile(path, None))
    try:
        ledger.verify()
        heads = [head for _, head in ledger.released_heads()]
        if 0 < said["count"] < len(heads):
            found = heads[said["count"]]
        else:
            found = ""
        # Releases of an earlier version have the whole chain's count and head.
        whole = {entry.sequence: entry.hash for entry in ledger.entries()}
    except BadInput:
        return "`silodp ledger verify` refuses its ledger, and says why"
    if said["head"] in (found, whole.get(said["count"])):
        return ""
    return (
        f"its ledger has {'another' if found else 'no'} entry {said['count']} "
        f"{'than' if found else 'such as'} the run was told of"
    )


def _ledger(policy: Path | None) -> Path | None:
    from silodp.silo.service.policy import DaemonSettings

    try:
        if policy:
            path = Path(DaemonSettings.load(policy).ledger)
        else:
            path = None
        if path and path.is_file() and os.access(path, os.R_OK):
            return path
        return None
    except (BadInput, OSError):
        return None


def _policies(run: Path) -> dict[str, Path]:
    """The silos' policies, of the federation in whose folder the run lies, or the silo's folder of
    a run among peers.
    """
    from silodp.cli.federation_files import state_in

    for folder in run.resolve().parents[1:3]:
        with contextlib.suppress(BadInput):
            if isinstance(silos := (state_in(folder) or {}).get("silos"), dict):
                return {silo: Path(str(policy)) for silo, policy in silos.items()}
    return {}
