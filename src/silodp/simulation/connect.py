"""All silos in one process: convenient and fast, without isolation between them.

Who is trusted decides what stands between gate and server: nothing (isrl), the sum over silos
(masks, or a shuffler that passes on totals), or one curator with everybody's records (central).
Masks cancel to the last bit in a sum (tests/core/protocol/test_masks.py), so none are drawn here.
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
    """A federation over these records whose gate charges each run and silo by the plan's rule and
    budgets. Silos count alike.
    """
    ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), records.counts)
    totals = any(m.total for m in plan.mechanisms.values())
    weights = Weights("records" if totals else "equal", records.counts)
    trust = "shuffle" if totals else "isrl"
    who = participation or Everyone(len(records))
    return connect(trust, problem, records, ledger, seeds, who, weights), ledger


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
    """A federation over these records under this trust; `seen` may put something around the channel
    that the server asks through. `engines` compute the clipped sums. A total counts on the noise of
    all but `colluding` of its silos.

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
    """Answers for all silos' records in one place; in a round without some silos, for those of the
    others.

    The noise is that of a sum over whoever takes part, 2 clip x multiplier in all, so a record's
    price is the same in every round.
    """

    def __init__(
        self,
        problem: Problem,
        records: Records,
        seeds: Seeds,
        engines: Sequence[Engine] = ENGINES,
    ) -> None:
        super().__init__(problem, records.pooled(), seeds, engines=engines)
        self._apart = records.counts
        self._silo = torch.repeat_interleave(
            torch.arange(len(records)), torch.tensor(records.counts)
        ).to(records.x.device)
        self.present: tuple[int, ...] = tuple(range(len(records)))

    def _weight(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        """Which records are in a batch is drawn among all of them, whoever takes part: no record is
        in two batches of a partition.
        """
        present = self.present
        self.present = tuple(range(len(self._apart)))
        weight = super()._weight(sampling, silos)
        self.present = present
        if len(present) == len(self._apart):
            return weight
        return weight * torch.isin(self._silo, torch.tensor(present, device=self._silo.device)).to(
            weight
        )

    def _batch(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        """Of those that take part, on average."""
        whole = super()._batch(sampling, silos)
        present = sum(self._apart[i] for i in self.present)
        if len(self.present) == len(self._apart):
            return whole
        return whole * (present / sum(self._apart))


class _ToCurator:
    """The channel of one who has all records: silos are told apart only by taking part in a round
    or not.
    """

    def __init__(self, gate: Gate, curator: Curator) -> None:
        self._gate = gate
        self._curator = curator

    def ask(self, query: Query, silos: Sequence[int]) -> Release:
        self._curator.present = tuple(silos)
        return self._gate.answer(query, [0])


class Curated(Federation):
    """What the curator says is the mean already."""

    def mean(self, query: Query) -> Tensor:
        return self._channel.ask(query, self._participation.draw()).value[:, 0]

    def measure(self, query: Query) -> Measured:
        asked = self._participation.draw()
        everybody = Weights("equal", (sum(self._weights.trained[i] for i in asked),))
        return Measured(
            self._channel.ask(query, asked).value[:, 0], *query.mechanism.deviation([0], everybody)
        )


def asked_by(mechanism: Mechanism) -> dict[str, object]:
    """What a transcript says of a release's noise."""
    event = mechanism.event()
    return {name: torch.as_tensor(getattr(event, name)).flatten().tolist() for name in event.wire}
