"""The known mistakes, each planted in a copy of the pipeline, and whether the probes catch it: of a
silo, of a shuffle, of masks, of every answer, and of prices.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from pathlib import Path

from mistakes.answers import OF_ANSWERS
from mistakes.masked import OF_MASKS
from mistakes.prices import OF_PRICES
from mistakes.shuffled import OF_A_SHUFFLE
from mistakes.silo import OF_A_SILO
from silodp.audit.pipeline import SOUND, Caught, Pipeline, Probe, Probes
from silodp.audit.probes_answers import ANSWERS
from silodp.audit.probes_batches import BATCHES
from silodp.audit.probes_masked import MASKED
from silodp.audit.probes_prices import PRICES
from silodp.audit.probes_shuffled import SHUFFLED_DEPLOYMENT, SHUFFLED_SIMULATION
from silodp.audit.probes_silo import DEPLOYMENT, SIMULATION
from silodp.simulation.sweep import Tick, spread, unseen

MUTANTS = OF_A_SILO | OF_A_SHUFFLE | OF_MASKS | OF_ANSWERS | OF_PRICES
GROUPS: tuple[tuple[dict[str, Pipeline], list[Probes]], ...] = (
    (OF_A_SILO, [SIMULATION, DEPLOYMENT]),
    (OF_A_SHUFFLE, [SHUFFLED_SIMULATION, SHUFFLED_DEPLOYMENT]),
    (OF_MASKS, [MASKED]),
    (OF_ANSWERS, [ANSWERS, BATCHES]),
    (OF_PRICES, [PRICES]),
)
IN_MEMORY = Path("/dev/shm")
"""Where silos are set up for a probe, if it is there: no probe is about a disk, and deployed
ledgers wait for theirs.
"""


def probes_of(name: str | None) -> dict[str, Probe]:
    """Those of the half, simulation or deployment, that the mutant changes: the other half is the
    shipped one. All for the shipped pipeline.
    """
    probes: dict[str, Probe] = {}
    for group, halves in GROUPS:
        for half in halves:
            if name is None or (name in group and _changed(group[name]) & half.parts):
                probes |= half
    return probes


def _changed(pipeline: Pipeline) -> set[str]:
    return {part for part in vars(pipeline) if getattr(pipeline, part) is not getattr(SOUND, part)}


def examine(
    name: str | None,
    seed: int,
    *,
    ignored: Collection[str] = (),
    probes: Collection[str] | None = None,
) -> dict[str, str]:
    """Every probe (of these) that catches the shipped pipeline, or the first one that catches the
    mutant of this name, with what it says.
    """
    found: dict[str, str] = {}
    for probe, try_it in probes_of(name).items():
        if probe in ignored or (probes is not None and probe not in probes):
            continue
        with tempfile.TemporaryDirectory(
            dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
        ) as folder:
            try:
                try_it(SOUND if name is None else MUTANTS[name], seed, Path(folder))
            except Caught as caught:
                found[probe] = str(caught)
                if name is not None:
                    break
    return found


def _shipped(probe: str, seed: int) -> dict[str, str]:
    return examine(None, seed, probes=[probe])


def _mutant(name: str, seed: int, ignored: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    return name, examine(name, seed, ignored=ignored)


def examine_all(seed: int = 0, *, tick: Tick = unseen) -> tuple[list[dict], dict[str, str]]:
    """Rows {"mutant", "caught", "caught_by", "says"}, and the probes that alarm on the pipeline as
    shipped: there must be none. On all cores.

    A probe that alarms on the shipped pipeline proves nothing about a mutant, and does not count.
    """
    shipped: dict[str, str] = {}
    probes, total = probes_of(None), len(probes_of(None)) + len(MUTANTS)
    for alarms in spread(
        _shipped, [(probe, seed) for probe in probes], tick=lambda done, _: tick(done, total)
    ):
        shipped |= alarms
    found = dict(
        spread(
            _mutant,
            [(name, seed, tuple(shipped)) for name in MUTANTS],
            tick=tick,
            before=len(probes),
        )
    )
    rows = [(name, found[name]) for name in MUTANTS]
    return [
        {
            "mutant": n,
            "caught": bool(f),
            "caught_by": ", ".join(f),
            "says": next(iter(f.values()), ""),
        }
        for n, f in rows
    ], shipped
