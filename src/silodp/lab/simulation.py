"""All silos in one process: convenient and fast, without isolation between them."""

from __future__ import annotations

from collections.abc import Sequence

from silodp.core.mechanisms import Shuffled
from silodp.core.problem.problem import Problem
from silodp.core.weights import Weights
from silodp.server.federation import Everyone, Federation
from silodp.server.plan import Plan
from silodp.server.shuffled import ShuffledFederation
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.wire.inprocess import InProcess, ThroughShuffler


def simulate(
    problem: Problem, records: Records, plan: Plan, seeds: Sequence[int | tuple[int, ...]], participation: Everyone | None = None
) -> tuple[Federation, MemoryLedger]:
    """A federation over these records whose gate charges each run and silo by the plan's rule and budgets."""
    ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), records.counts)
    gate = Gate(Simulated(problem, records, seeds), ledger, dim=problem.dim, counts=records.counts, runs=len(seeds))
    who = participation or Everyone(len(records))
    if any(isinstance(m, Shuffled) for m in plan.mechanisms.values()):
        return ShuffledFederation(ThroughShuffler(gate, records.counts), who, Weights("records", tuple(records.counts))), ledger
    return Federation(InProcess(gate), who), ledger
