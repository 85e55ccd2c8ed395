"""What an examiner tries on a deployed silo: plain checks at its door, over frames, restarts, retries and copies. None of them can alarm falsely,
save where two 100-bit draws of noise agree by chance.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import gdp_mu
from silodp.core.protocol.codec import OVERHEAD, Answer, decode_reply
from silodp.core.query import Query
from silodp.lab.audit.pipeline import BUDGET, DIM, Pipeline, Silo, question
from silodp.lab.audit.probes import Caught, Probe
from silodp.silo.answer.exact import lattice_step
from silodp.silo.ledger.durable import DurableLedger


def durable_charge_first(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """When records are looked at, another process already finds the charge on disk."""
    seen: list[int] = []

    class Watching(pipeline.exact):
        def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
            seen.append(sum(entry.act == "charge" for entry in DurableLedger.open(silo.path).entries()))
            return super().answer(query, silos)

    silo = Silo(folder / "silo", replace(pipeline, exact=Watching))
    silo.ask("first", question())
    if set(seen) != {1}:
        raise Caught(f"{seen[0]} charges were on disk when records were looked at; there should be one")


def restarts(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Over restarts the answers never cost more than the budget; a missing or an older ledger is refused, never begun anew."""
    silo = Silo(folder / "silo", pipeline)
    price, spent = 0.3 * gdp_mu(BUDGET) ** 2, 0.0
    shutil.copy(silo.path, folder / "older")
    for turn in range(6):
        reply = decode_reply(silo.handle(silo.frame(f"q{turn}", question(1 / math.sqrt(price)))), limit=2**20)
        spent += price if isinstance(reply, Answer) else 0.0
        silo.restart()
    if spent > gdp_mu(BUDGET) ** 2:
        raise Caught(f"with restarts in between, answers worth {spent / gdp_mu(BUDGET) ** 2:.1f} budgets were given")
    for what in ("older", "missing"):
        silo.path.unlink()
        if what == "older":
            shutil.copy(folder / "older", silo.path)
        try:
            pipeline.reopen(silo.path)
        except BadInput:
            continue
        raise Caught(f"the gate opens with a ledger that is {what}")


def retries(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """The same frame again, also after a restart, gets the same bytes and costs nothing."""
    silo = Silo(folder / "silo", pipeline)
    frame = silo.frame("once", question())
    first, count = silo.handle(frame), silo.ledger.head()
    for again in ("", " after a restart"):
        if silo.handle(frame) != first:
            raise Caught(f"the same query asked again{again} gets another answer")
        if silo.ledger.head() != count:
            raise Caught(f"the same query asked again{again} changes the ledger")
        silo.restart()


def entropy(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Two silos alike to the last byte answer the same frame with different noise: none of it comes from what the server sent."""
    twins = [Silo(folder / name, pipeline) for name in ("one", "two")]
    frame = twins[0].frame("same", question())
    one, two = (decode_reply(twin.handle(frame), limit=2**20) for twin in twins)
    if not (isinstance(one, Answer) and isinstance(two, Answer)):
        raise Caught("the gate does not answer")
    if torch.equal(one.value, two.value):
        raise Caught("two silos with the same records give the same answer to the same frame: whoever sent it can predict the noise")
    if torch.equal(one.value, twins[0].ask("other", question()).value):
        raise Caught("two queries get the same noise")


def bare_reply(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """A reply is d numbers, the names and event that the query gave, and the ledger's count and head: nothing else about the records."""
    silo = Silo(folder / "silo", pipeline)
    query = question()
    frame = silo.frame("bare", query)
    reply = decode_reply(silo.handle(frame), limit=2**20)
    if not isinstance(reply, Answer):
        raise Caught("the gate does not answer")
    if reply.value.shape != (1, DIM):
        raise Caught(f"a reply has {reply.value.numel()} numbers where the query asks for {DIM}")
    charge = next(entry for entry in silo.ledger.entries() if entry.act == "charge")
    event, mechanism = reply.event, query.mechanism
    facts = (reply.silo, reply.query_id, reply.digest, event.sampling, event.noise_multiplier, event.count, reply.count, reply.head)
    digest = hashlib.sha256(frame[OVERHEAD:]).hexdigest()
    public = (silo.policy.silo, "bare", digest, mechanism.sampling, mechanism.noise_multiplier, 1, charge.sequence, charge.hash)
    if facts != public:
        raise Caught("a reply says something that follows neither from the query nor from the ledger")


def on_lattice(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Every released number is on one lattice, gamma / n times the integers, that the query alone decides.

    Then every number that can be released at all can be released by every data set. Float noise has another support around each sum:
    `impossible` names numbers that only one of two neighbours can release (Mironov 2012).
    """
    for target in (0.25, 30.0):
        silo = Silo(folder / f"target-{target}", pipeline, target=target)
        value = silo.ask("lattice", question()).value.flatten().tolist()
        gamma, n = lattice_step(1.0, DIM), silo.records.counts[0]
        off = sum(gamma * round(v * n / gamma) / n != v for v in value)
        if off:
            raise Caught(f"{off} of {DIM} released numbers are not on the public lattice of step {gamma:.3g} / {n}")


def impossible(output: float, mean: float) -> bool:
    """Whether no float whatever gives `output` when it is added to `mean` in float64: such an output rules this mean out for certain."""
    near = output - mean
    return all(mean + noise != output for noise in (math.nextafter(near, -math.inf), near, math.nextafter(near, math.inf)))


DEPLOYMENT: dict[str, Probe] = {
    "charge on disk before records": durable_charge_first,
    "restarts and old copies": restarts,
    "retries": retries,
    "twin silos": entropy,
    "bare reply": bare_reply,
    "public lattice": on_lattice,
}
