"""Probes of masked totals: tables that no gate may accept, masks that must be new for every
question, and noise that must be new for every cohort.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silodp.audit.masked import Companion, attack_masked, masked_claims, unmasked, with_cohort
from silodp.audit.pipeline import DIM, Caught, Pipeline, Probes, Silo, public
from silodp.audit.probes_silo import check_claims
from silodp.audit.transcript import Case
from silodp.core.lattice import most
from silodp.core.mechanisms import Masked
from silodp.core.privacy.accounting import Budget
from silodp.core.protocol.codec import Envelope, Sealed, decode_reply, encode_query
from silodp.core.protocol.masks import MODULI, Row, read_table, write_table
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.silo.service.masking import Masking

MASKED = Probes("masker")
OWN = 12
OTHERS = 12
SHARE = 1.0
LARGEST = most(SHARE, 1.0, DIM, OWN)
"""The largest number of one silo's answer."""


class Hidden(Silo):
    """A deployed silo of 12 records among three of as many, of which one may collude."""

    budget = Budget(50.0, 1e-5)

    def __init__(self, folder: Path, pipeline: Pipeline) -> None:
        self.masking = Masking((), 1, 3, attempts=2)
        super().__init__(folder / "silo", pipeline)
        self.others = [Companion(f"companion-{i}", self.policy.definition) for i in range(3)]
        self.masking = replace(self.masking, members=tuple(other.member for other in self.others))
        self.restart()

    def own(self) -> Row:
        assert self.trust is not None
        return self.trust.offer(public(self._key), "audit")

    def asked(
        self,
        name: str,
        others: list[Companion] | None = None,
        *,
        round: str = "0",
        attempt: int = 0,
        **changes: Any,
    ) -> Envelope:
        some = self.others if others is None else others
        noise: dict[str, Any] = {
            "noise_multiplier": SHARE,
            "counted": len(some),
            "modulus": 32,
        } | changes
        query = Query(Grad(torch.full((1, DIM), 0.5)), Masked("audit", 1.0, **noise))
        return with_cohort(
            self.envelope(name, query, round),
            self.own(),
            OWN,
            [(other, OTHERS) for other in some],
            attempt,
        )

    def reply(self, envelope: Envelope) -> bytes | None:
        """Return the words of an answer; None for a refusal."""
        got = decode_reply(self.handle(encode_query(envelope, self._key)), limit=2**20)
        return got.box if isinstance(got, Sealed) else None


@MASKED.probe("tables")
def tables(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a table on which the price cannot count is refused, unlike an honest one."""
    silo = Hidden(folder, pipeline)
    stranger = Companion("stranger", silo.policy.definition)
    good = silo.asked("q")
    rows = {row.identity: row for row in read_table(good.cohort)}
    first = silo.others[0].row
    own = silo.own()

    def changed(row: Row, **parts: Any) -> Envelope:
        made = {**rows, row.identity: replace(rows[row.identity], **parts)}
        return replace(good, cohort=write_table(made.values()))

    hostile = {
        "a silo that no officer has pinned": silo.asked("q", [*silo.others[:2], stranger]),
        "a key that the server has put beside another's identity": changed(
            first, key=stranger.row.key
        ),
        "the noise of a silo that is absent": silo.asked("q", silo.others[:2], counted=3),
        "the noise of silos that may collude": silo.asked("q", counted=4),
        "more records of this silo than it has": changed(own, records=OWN + 1),
        "too few silos": silo.asked("q", silo.others[:1]),
        "a total that wraps around": changed(first, records=2**33),
    }
    for what, envelope in hostile.items():
        if silo.reply(envelope) is not None:
            raise Caught(f"a gate answers for a cohort with {what}")
    if silo.reply(good) is None:
        raise Caught("a gate refuses an honest cohort")


@MASKED.probe("masks")
def masks(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that every answer is masked, and no two by the same masks. A retry is the same bytes.
    No key and no epoch outlives its answer.
    """
    silo = Hidden(folder, pipeline)
    found = []
    for i in range(2):
        envelope = silo.asked(f"q{i}", round=str(i))
        answer = silo.reply(envelope)
        if answer is None:
            raise Caught("a gate refuses an honest cohort")
        if silo.reply(envelope) != answer:
            raise Caught("the same question asked again gets another answer")
        words = np.frombuffer(answer, MODULI[32])
        if int(np.abs(words.view("<i4")).max()) <= LARGEST:
            raise Caught("an answer holds a silo's numbers as they are")
        bare = unmasked(answer, envelope, silo.others)
        found.append(words - bare.astype(MODULI[32]))
        if int(np.abs(bare).max()) > LARGEST and i == 0:
            raise Caught("masks do not cancel in the sum over a cohort")
    if (found[0] == found[1]).any():
        raise Caught(
            "two questions are answered under the same masks: their difference is that of "
            "the numbers"
        )
    before = silo.asked("late", round="9")
    silo.restart()
    if silo.reply(before) is not None:
        raise Caught(
            "after a restart a question is answered that names a key of the process before"
        )
    last = silo.asked("last", round="8")
    if silo.reply(last) is None or silo.own().key in {row.key for row in read_table(last.cohort)}:
        raise Caught("a key is kept after the answer that it was made for")


@MASKED.probe("two cohorts")
def two_cohorts(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that each attempt at a round has noise of its own, and that there are no more attempts
    than the policy allows.
    """
    silo = Hidden(folder, pipeline)
    found = []
    for attempt, others in enumerate((silo.others, silo.others[:2])):
        envelope = silo.asked(f"q{attempt}", others, attempt=attempt, counted=2)
        answer = silo.reply(envelope)
        if answer is None:
            raise Caught("a gate refuses to be asked again with a smaller cohort")
        found.append(unmasked(answer, envelope, others))
    if np.array_equal(*found):
        raise Caught(
            "two cohorts of a round get the same numbers: their totals differ by the silo "
            "that left, without noise"
        )
    if silo.reply(silo.asked("q2", silo.others[1:], attempt=2, counted=2)) is not None:
        raise Caught("a round is asked more often than the policy allows")


@MASKED.probe("what colluding silos learn")
def colluding(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check a masked total without the numbers of the colluding silos against the claim epsilon = 6
    of its price. A separation twice as large is seen.
    """
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    check_claims(
        case,
        attack_masked(case, 800, pipeline=pipeline),
        masked_claims(case, pipeline),
        "server and colluding silos",
    )
