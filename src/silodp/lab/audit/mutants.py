"""The sixteen known mistakes, each planted in a copy of the pipeline, and whether the probes catch it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from silodp.lab.audit import mistakes
from silodp.lab.audit.pipeline import SOUND, Pipeline
from silodp.lab.audit.probes import SIMULATION, Caught, Probe
from silodp.lab.audit.probes_deployed import DEPLOYMENT

MUTANTS: dict[str, Pipeline] = {
    "per-layer clipping": replace(SOUND, answerer=mistakes.PerLayer),
    "noise for half the sensitivity": replace(SOUND, answerer=mistakes.HalfSensitivity),
    "noise only on anchors": replace(SOUND, answerer=mistakes.AnchorsOnly),
    "the same noise in two rounds": replace(SOUND, answerer=mistakes.SameNoise),
    "noise shared between silos": replace(SOUND, answerer=mistakes.SharedNoise),
    "seed from the server": replace(SOUND, door=mistakes.SeedFromServer),
    "sampling with replacement accounted as without": replace(SOUND, answerer=mistakes.WithReplacement),
    "ledger reset on restart": replace(SOUND, reopen=mistakes.begins_anew),
    "answer before charge": replace(SOUND, gate=mistakes.AnswersFirst),
    "retry with fresh noise": replace(SOUND, door=mistakes.ForgetsAnswers),
    "data-dependent clip": replace(SOUND, answerer=mistakes.MedianClip),
    "raw loss in the reply": replace(SOUND, gate=mistakes.SendsLoss, door=mistakes.DoorSendsLoss),
    "anchors and differences each given the whole exact budget": replace(
        SOUND, calibrate=mistakes.whole_budget_each, ledger=mistakes.NoFilter
    ),
    "NaN that passes the clip": replace(SOUND, answerer=mistakes.PassesNaN),
    "difference norms by the cancelling formula": replace(SOUND, answerer=mistakes.Cancelling),
    "float noise without lattice": replace(SOUND, exact=mistakes.FloatNoise),
}


def examine(pipeline: Pipeline, seed: int) -> dict[str, str]:
    """Every probe that catches the pipeline, with what it says; nothing for a sound one.

    A mutant's probes are those of the half, simulation or deployment, that it changes: the other half is the shipped one.
    """
    mutated = {name for name in vars(pipeline) if getattr(pipeline, name) is not getattr(SOUND, name)}
    probes: dict[str, Probe] = {}
    if not mutated or mutated & {"answerer", "gate", "ledger", "calibrate"}:
        probes |= SIMULATION
    if not mutated or mutated & {"gate", "exact", "door", "reopen"}:
        probes |= DEPLOYMENT
    found = {}
    for name, probe in probes.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                probe(pipeline, seed, Path(folder))
            except Caught as caught:
                found[name] = str(caught)
    return found


def examine_all(seed: int = 0) -> tuple[list[dict], dict[str, str]]:
    """Rows {"mutant", "caught", "caught_by", "says"}, and the probes that alarm on the pipeline as shipped: there must be none.

    A probe that alarms on the shipped pipeline proves nothing about a mutant, and does not count.
    """
    shipped = examine(SOUND, seed)
    rows = []
    for name, pipeline in MUTANTS.items():
        found = {probe: reason for probe, reason in examine(pipeline, seed).items() if probe not in shipped}
        rows.append({"mutant": name, "caught": bool(found), "caught_by": ", ".join(found), "says": next(iter(found.values()), "")})
    return rows, shipped
