"""Masked totals under attack: other members of a cohort, whose keys the audit has, and what a
gate's answer is without its masks.

The attack tells neighbouring data sets apart by the totals of a cohort of which all but two silos
collude with the server, which so takes their noise out again. It asks as a hostile server would:
for a price that counts on as much noise as the gates let it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from silodp.audit import claims
from silodp.audit.canary import RECORDS, neighbours
from silodp.audit.pipeline import SOUND, Pipeline, public, sealing, signing
from silodp.audit.shuffled import POINTS, Deployed, plan_of, scores_of
from silodp.audit.transcript import Case
from silodp.core.errors import Refused
from silodp.core.mechanisms import Masked
from silodp.core.protocol.codec import Envelope
from silodp.core.protocol.masks import Row, add_masked, masked, offered, read_table, write_table
from silodp.server.plan import Plan
from silodp.silo.service.masking import Masking

RUN = "audit"
COHORT = 12
COLLUDING = 10


class Companion:
    """Another silo of a masked total. What it adds is zero, so that its answer takes its masks off
    another's.
    """

    def __init__(self, name: str, definition: str) -> None:
        self.identity = signing(name)
        self._key = sealing(name)
        self.member = f"{name} {public(self.identity)}"
        self.row = offered(
            self.identity, self._key, definition=definition, run=RUN, epoch=bytes(16)
        )

    def answer(self, envelope: Envelope, dimension: int) -> bytes:
        rows = read_table(envelope.cohort)
        (mine,) = (row for row in rows if row.key == self.row.key)
        asked = envelope.query.mechanism
        return masked(
            np.zeros(dimension, np.int64),
            self._key,
            mine,
            rows,
            envelope.shuffle_round,
            asked.modulus,
        )


def with_cohort(
    envelope: Envelope,
    own: Row,
    records: int,
    others: Sequence[tuple[Companion, int]],
    attempt: int = 0,
) -> Envelope:
    """Return the question to a silo with so many records in the batch, and to these others with
    theirs.
    """
    members = [(own, records), *((other.row, n) for other, n in others)]
    table = write_table(replace(row, records=n) for row, n in members)
    return replace(envelope, cohort=table, attempt=attempt)


def unmasked(answer: bytes, envelope: Envelope, others: Sequence[Companion]) -> np.ndarray:
    """(d,): the numbers in a silo's answer, which the server and all others can read together."""
    modulus = envelope.query.mechanism.modulus
    dimension = len(answer) * 8 // modulus
    return add_masked([answer, *(other.answer(envelope, dimension) for other in others)], modulus)


# --- the attack ----------------------------------------------------------------------------------


def attack_masked(
    case: Case, runs: int, *, pipeline: Pipeline = SOUND
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of what server and colluding silos see together: totals of the two honest silos'
    numbers, under these two's noise alone.
    """
    mechanism = as_masked(priced(case, pipeline))
    points = POINTS[: int(case.settings["rounds"])]
    return scores_of(
        [
            Cohort(world, mechanism, pipeline, points)
            for world in neighbours(silos=COHORT - COLLUDING)
        ],
        runs,
    )


def masked_claims(case: Case, pipeline: Pipeline) -> claims.Claims:
    """Return what the price says of the totals that the gates answer."""
    return claims.of_plan(priced(case, pipeline), case.budget)


def priced(case: Case, pipeline: Pipeline) -> Plan:
    """The plan of this claim with the least noise that a gate still answers: one that counts on as
    many again who are absent, on everybody in the table, or, as it must be, on those who do not
    collude."""
    for counts, colluding in (
        ((RECORDS,) * 2 * COHORT, 0),
        ((RECORDS,) * COHORT, 0),
        ((RECORDS,) * COHORT, COLLUDING),
    ):
        plan = plan_of(case, counts, pipeline, colluding)
        world = neighbours(silos=COHORT - COLLUDING)[0]
        try:
            Cohort(world, as_masked(plan), pipeline, POINTS[:1]).envelope()
        except Refused:
            continue
        return plan
    raise AssertionError("a gate refuses an honest cohort")


def as_masked(plan: Plan) -> Masked:
    (mechanism,) = plan.mechanisms.values()
    return mechanism


@dataclass(frozen=True)
class Cohort(Deployed):
    """The honest silos of a cohort, with a deployed gate's arithmetic and masks; the others' keys
    and numbers are the attacker's.
    """

    def rounds(self, runs: int) -> Iterator[list[np.ndarray]]:
        """Mask all runs and rounds as one long vector, since keys take longer than all the rest."""
        drawn = np.array(list(self.numbers(runs)))  # (runs, rounds, silos, d)
        envelope, maskers, others = self.envelope()
        answers = [
            masker.hide("server", envelope, drawn[:, :, i].ravel())
            for i, masker in enumerate(maskers)
        ]
        answers += [other.answer(envelope, drawn[:, :, 0].size) for other in others]
        modulus = self.queries()[0].mechanism.modulus
        seen = add_masked(answers, modulus).reshape(drawn[:, :, 0].shape)
        yield from map(list, seen)

    def envelope(self) -> tuple[Envelope, list[Any], list[Companion]]:
        """Return the question, which every honest gate has checked, their maskers, and the
        colluding silos. Refused as the first gate refuses.
        """
        definition = "0" * 64
        honest = [signing(f"honest-{i}") for i in range(len(self.world))]
        others = [Companion(f"colluding-{i}", definition) for i in range(COLLUDING)]
        pins = [
            *(f"honest-{i} {public(key)}" for i, key in enumerate(honest)),
            *(other.member for other in others),
        ]
        maskers = [
            self.pipeline.masker(
                Masking((*pins[:i], *pins[i + 1 :]), COLLUDING, COHORT), key, definition
            )
            for i, key in enumerate(honest)
        ]
        rows = [
            *(masker.offer("server", RUN) for masker in maskers),
            *(other.row for other in others),
        ]
        table = write_table(replace(row, records=RECORDS) for row in rows)
        made = Envelope("all", RUN, "all", definition, self.queries()[0], "0", cohort=table)
        for masker in maskers:
            masker.check(made, RECORDS)
        return made, maskers, others
