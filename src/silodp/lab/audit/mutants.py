"""The known mistakes, each planted in a copy of the pipeline, and whether the probes catch it: sixteen of a silo, sixteen of a shuffle."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from silodp.lab.audit import mistakes, mistakes_shuffled
from silodp.lab.audit.pipeline import SOUND, Pipeline
from silodp.lab.audit.probes import SIMULATION, Caught, Probe
from silodp.lab.audit.probes_deployed import DEPLOYMENT
from silodp.lab.audit.probes_shuffled import SHUFFLED_DEPLOYMENT, SHUFFLED_SIMULATION

OF_A_SILO: dict[str, Pipeline] = {
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
OF_A_SHUFFLE: dict[str, Pipeline] = {
    "levels over half the range": replace(SOUND, exact=mistakes_shuffled.OverHalfTheRange),
    "coordinates clipped after rounding": replace(SOUND, exact=mistakes_shuffled.ClipsCoordinates),
    "rounding to nearest": replace(SOUND, exact=mistakes_shuffled.RoundsToNearest),
    "noise bits for a silo": replace(SOUND, exact=mistakes_shuffled.CoinsForASilo),
    "the same coins in two rounds": replace(SOUND, exact=mistakes_shuffled.SameCoins),
    "box that demands nothing": replace(SOUND, door=mistakes_shuffled.DemandsNothing),
    "retry with a fresh box": replace(SOUND, door=mistakes_shuffled.FreshBox),
    "counts in the open": replace(SOUND, door=mistakes_shuffled.OpenCounts),
    "shares of rounds not added up": replace(SOUND, ledger=mistakes_shuffled.EachAlone),
    "pseudonym that counts twice": replace(SOUND, pool=mistakes_shuffled.CountsTwice),
    "total of too few": replace(SOUND, pool=mistakes_shuffled.PassesFew, channel=mistakes_shuffled.ThroughFew),
    "counts passed on unsummed": replace(SOUND, pool=mistakes_shuffled.PassesSeparate, channel=mistakes_shuffled.ThroughSeparate),
    "round passed on again": replace(SOUND, store=mistakes_shuffled.ForgetsRounds),
    "noise's mean subtracted once": replace(SOUND, analysed=mistakes_shuffled.subtracts_noise_once),
    "sum centred once": replace(SOUND, analysed=mistakes_shuffled.centres_once),
    "anchors noised as printed": replace(SOUND, calibrate_shuffled=mistakes_shuffled.anchors_as_printed, ledger=mistakes.NoFilter),
}
MUTANTS = OF_A_SILO | OF_A_SHUFFLE
SILO_HALVES: list[tuple[set[str], dict[str, Probe]]] = [
    ({"answerer", "gate", "ledger", "calibrate"}, SIMULATION),
    ({"gate", "exact", "door", "reopen"}, DEPLOYMENT),
]
SHUFFLE_HALVES: list[tuple[set[str], dict[str, Probe]]] = [
    ({"ledger", "channel", "calibrate_shuffled"}, SHUFFLED_SIMULATION),
    ({"exact", "door", "analysed", "pool", "store"}, SHUFFLED_DEPLOYMENT),
]


def examine(pipeline: Pipeline, seed: int) -> dict[str, str]:
    """Every probe that catches the pipeline, with what it says; nothing for a sound one.

    A mutant's probes are those of the half, simulation or deployment, that it changes: the other half is the shipped one.
    """
    mutated = {name for name in vars(pipeline) if getattr(pipeline, name) is not getattr(SOUND, name)}
    halves = [*SILO_HALVES, *SHUFFLE_HALVES] if not mutated else SHUFFLE_HALVES if pipeline in OF_A_SHUFFLE.values() else SILO_HALVES
    probes: dict[str, Probe] = {}
    for parts, half in halves:
        probes |= half if not mutated or mutated & parts else {}
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
