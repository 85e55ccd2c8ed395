"""All silos in one process: convenient and fast, without isolation between them.

The trust decides what is between gate and server. With isrl it is nothing. With masks or shuffle it
is a sum over silos. With central it is one curator with the records of all silos. Masks cancel to
the last bit in a sum (tests/core/protocol/test_masks.py), so none are drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from silodp.core.mechanisms import Mechanism
from silodp.core.problem.problem import Problem
from silodp.core.query import Query, Release
from silodp.core.sampling import Sampling
from silodp.core.weights import Weights
from silodp.engine.clipping import ENGINES
from silodp.engine.task import Engine
from silodp.server.federation import Channel, Everyone, Federation, Measured
from silodp.server.order import TOTALS
from silodp.server.plan import Plan
from silodp.server.shuffled import ShuffledFederation
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.wire.inprocess import InProcess, ThroughShuffler

Seeds = Sequence[int | tuple[int, ...]]


def simulate(
    problem: Problem,
    records: Records,
    plan: Plan,
    seeds: Seeds,
    participation: Everyone | None = None,
) -> tuple[Federation, MemoryLedger]:
    """Return a federation over these records, and its ledger. The gate charges each run and silo by
    the plan's rule and budgets. With totals each record counts alike, otherwise each silo.
    """
    ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), records.counts)
    if any(m.total for m in plan.mechanisms.values()):
        trust = "shuffle"
        weights = Weights("records", records.counts)
    else:
        trust = "isrl"
        weights = Weights("equal", records.counts)
    participation = participation or Everyone(len(records))
    return connect(trust, problem, records, ledger, seeds, participation, weights), ledger


def connect(
    trust: str,
    problem: Problem,
    records: Records,
    ledger: MemoryLedger,
    seeds: Seeds,
    who: Everyone,
    weights: Weights,
    seen: Callable[[Channel], Channel] = lambda channel: channel,
    *,
    colluding: int = 0,
    engines: Sequence[Engine] = ENGINES,
) -> Federation:
    """Return a federation over these records under this trust; `seen` may put something around the
    channel that the server asks through. `engines` compute the clipped sums. A total counts on the
    noise of all but `colluding` of its silos.

    Of a curator the ledger is of one silo, which has all records: whoever takes part, its one noise
    is in every answer.
    """
    if trust == "central":
        curator = Curator(problem, records, seeds, engines)
        gate = Gate(
            curator, ledger, dim=problem.dim, counts=curator.records.counts, runs=len(seeds)
        )
        return Curated(seen(_ToCurator(gate, curator)), who, weights)
    gate = Gate(
        Simulated(problem, records, seeds, engines=engines),
        ledger,
        dim=problem.dim,
        counts=records.counts,
        runs=len(seeds),
    )
    if trust in TOTALS:
        return ShuffledFederation(seen(ThroughShuffler(gate, colluding)), who, weights)
    return Federation(seen(InProcess(gate)), who, weights)


# --- a curator -----------------------------------------------------------------------------------


class Curator(Simulated):
    """Answers for the records of all silos in one place. In a round without some silos it answers
    for the records of the others.

    The noise is that of a sum over the silos that take part: 2 clip x multiplier in all. So a
    record's price is the same in every round.
    """

    def __init__(
        self,
        problem: Problem,
        records: Records,
        seeds: Seeds,
        engines: Sequence[Engine] = ENGINES,
    ) -> None:
        super().__init__(problem, records.pooled(), seeds, engines=engines)
        self._counts_apart = records.counts
        """Number of records of each silo, before they are pooled."""
        self._silo = torch.repeat_interleave(
            torch.arange(len(records)), torch.tensor(records.counts)
        ).to(records.x.device)
        self.present: tuple[int, ...] = tuple(range(len(records)))

    def _weight(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        """Return the weight of each record in a batch, 0 for a record of an absent silo.

        The batch is drawn among the records of all silos, in every round. So no record is in two
        batches of a partition.
        """
        present = self.present
        self.present = tuple(range(len(self._counts_apart)))
        weight = super()._weight(sampling, silos)
        self.present = present
        if len(present) == len(self._counts_apart):
            return weight
        members = torch.tensor(present, device=self._silo.device)
        return weight * torch.isin(self._silo, members).to(weight)

    def _batch(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        """Return the mean size of a batch of the records of the silos that take part."""
        size = super()._batch(sampling, silos)
        present = sum(self._counts_apart[i] for i in self.present)
        if len(self.present) == len(self._counts_apart):
            return size
        return size * (present / sum(self._counts_apart))


class _ToCurator:
    """The channel to a curator with all records. The silos of a query only decide whose records are
    in the answer.
    """

    def __init__(self, gate: Gate, curator: Curator) -> None:
        self._gate = gate
        self._curator = curator

    def ask(self, query: Query, silos: Sequence[int]) -> Release:
        """Return the curator's answer for the records of these silos."""
        self._curator.present = tuple(silos)
        return self._gate.answer(query, [0])


class Curated(Federation):
    """A federation whose curator's answer is the mean already."""

    def mean(self, query: Query) -> Tensor:
        """Return the curator's answer (J, d)."""
        return self._pooled(query)[0]

    def measure(self, query: Query) -> Measured:
        """Return the curator's answer, with the standard deviation of its noise and its effective
        number of records.
        """
        value, pooled = self._pooled(query)
        found = Measured(value, *query.mechanism.deviation([0], pooled))
        if self.record:
            self.record.measured(found)
        return found

    def _pooled(self, query: Query) -> tuple[Tensor, Weights]:
        """Return the curator's answer, and its one silo with all records that take part."""
        silos = self._participation.draw()
        pooled = Weights("equal", (sum(self._weights.trained[i] for i in silos),))
        value = self._channel.ask(query, silos).value[:, 0]
        if self.record:
            self.record.answered(query, [0], pooled)
        return value, pooled


def asked_by(mechanism: Mechanism) -> dict[str, object]:
    """Return the fields of a release's noise for a transcript."""
    event = mechanism.event()
    return {name: torch.as_tensor(getattr(event, name)).flatten().tolist() for name in event.wire}
