"""What an examiner tries on a shuffle: attacks on totals, an estimate whose truth is known, and
plain checks of doors, pool and store.

A false-alarm rate of 1e-6 for each statistical probe, and none for the others, save where two
rounds of 30-bit noise agree by chance.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy import stats

from silodp.audit.canary import canary_problem, neighbours
from silodp.audit.pipeline import (
    BUDGET,
    DIM,
    SOUND,
    Blank,
    Caught,
    Pipeline,
    Probes,
    Silo,
    public,
    sealing,
    signing,
)
from silodp.audit.probes_silo import FALSE_ALARM, check_claims, check_retries
from silodp.audit.shuffled import (
    SILOS,
    Deployed,
    Server,
    attack_shuffled,
    attack_totals,
    claims_of,
)
from silodp.audit.transcript import Case
from silodp.core.errors import Refused
from silodp.core.mechanisms import Shuffled
from silodp.core.privacy.accounting import GDP, gdp_mu
from silodp.core.protocol.box import Contribution, box_length, encrypt_box, open_box
from silodp.core.protocol.codec import Sealed, decode_reply
from silodp.core.protocol.relay import Passed, Request, decode_outcome, encode_request
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.federation import StopRun
from silodp.shuffler.door import ShufflerDoor
from silodp.silo.service.policy import Shuffling
from silodp.wire.inprocess import Total

SHUFFLED_SIMULATION = Probes("ledger", "channel", "in_totals")
SHUFFLED_DEPLOYMENT = Probes("exact", "door", "pool", "store")

# --- attacks -------------------------------------------------------------------------------------


@SHUFFLED_SIMULATION.probe("server's view of a shuffle")
def server_view(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Totals of anchors and differences together, against the claim epsilon = 6: a separation 1.5
    times as large as the plan's is seen.
    """
    case = Case("spider", 6.0, {"rounds": 8, "phase": 2, "slope": 1.0})
    _alarm(case, attack_shuffled(case, 10_000, seed=seed, pipeline=pipeline))


@SHUFFLED_DEPLOYMENT.probe("totals of deployed silos")
def deployed_totals(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check a total of the deployed silos' numbers against the claim epsilon = 6. A separation
    twice as large is seen.
    """
    case = Case("mb-sgd", 6.0, {"rounds": 1})
    _alarm(case, attack_totals(case, 1500, pipeline=pipeline))


def _alarm(case: Case, scores: tuple[np.ndarray, np.ndarray]) -> None:
    """Against what the shipped plan of this claim is worth at any delta."""
    check_claims(case, scores, claims_of(case, "shuffle", SOUND), "totals")


@SHUFFLED_DEPLOYMENT.probe("estimate from totals")
def estimate(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Deployed numbers, added: the mean of the clipped records, without bias and with the noise
    that was asked for.
    """
    world = neighbours(silos=SILOS)[1]
    runs = 600
    records = sum(world.counts)
    mechanism = Shuffled("probe", 1.0, 0.1, counted=SILOS)
    stage = Deployed(world, mechanism, pipeline, (0.0,))
    model = Server([SOUND.answerer(canary_problem(), world, [0])], world.counts)
    truth = mechanism.mean_in(model.expected(stage.queries()[0], 0), records)
    totals = torch.from_numpy(np.stack([seen[0] for seen in stage.rounds(runs)]))
    noise = float(mechanism.noise_in(SILOS, records))
    error = (mechanism.mean_in(totals, records) - truth) / noise
    dim = error.shape[1]
    off = float(error.mean(0).abs().max()) * math.sqrt(runs)
    if off > stats.norm.isf(FALSE_ALARM / 4 / dim):
        raise Caught(
            f"the estimate of a mean is off by {off / math.sqrt(runs):.2g} times its noise"
        )
    low, high = stats.chi2.interval(1 - FALSE_ALARM / 2, (runs - 1) * dim)
    if not low < (size := float(error.var(0).sum() * (runs - 1))) < high:
        raise Caught(
            f"an estimate has {math.sqrt(size / (runs - 1) / dim):.2f} times the noise "
            "that the query asks for"
        )


# --- simulation: channel and ledger --------------------------------------------------------------


class _Numbered:
    """A gate without records: silo i's numbers are all 10^i."""

    def answer(self, query: Query, silos) -> Total:
        return Total(torch.stack([torch.full((1, DIM), 10.0**i) for i in silos], 1), tuple(silos))


@SHUFFLED_SIMULATION.probe("one total of enough silos")
def channel(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a simulated shuffler passes on one sum over silos, of as many as were planned for,
    or nothing.
    """
    through = pipeline.channel(_Numbered())
    query = Query(Grad(torch.zeros(1, DIM)), Shuffled("probe", 1.0, 1.0, counted=3))
    total = through.ask(query, [0, 1, 2]).value
    if total.shape != (1, 1, DIM) or not bool((total == 111).all()):
        raise Caught(
            f"the server sees {total.shape[1]} vectors of numbers where one total is planned"
        )
    try:
        through.ask(query, [0, 1])
    except StopRun:
        return
    raise Caught("a total of 2 silos is passed on where noise of 3 was planned")


@SHUFFLED_SIMULATION.probe("price of rounds")
def price_of_rounds(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that the prices of rounds add up, and stop at the budget."""
    rule = GDP()
    query = Query(Grad(torch.zeros(1, DIM)), Shuffled("probe", 1.0, 1.0, counted=3))
    share = 1 / 3 / gdp_mu(BUDGET) ** 2
    gate = pipeline.gate(Blank(), pipeline.ledger(rule, BUDGET, [12]), dim=DIM, counts=[12])
    answers = 0
    for _ in range(math.ceil(2 / share)):
        try:
            gate.answer(query, [0])
        except Refused:
            break
        answers += 1
    if answers * share > 1:
        raise Caught(f"{answers} rounds worth {answers * share:.1f} budgets were answered")


# --- deployment: doors, pool, store --------------------------------------------------------------

MEMBERS = 4
SEAL = sealing("the audit's own shuffler")
SIGN = signing("its signature")
SERVER = signing("its server")
QUERY = Query(Grad(torch.full((1, DIM), 0.5)), Shuffled("audit", 1.0, 1.0, counted=3))


class Member(Silo):
    """A deployed silo that fears one colluding silo: its numbers may leave among 3 + 1 silos."""

    def __init__(self, folder: Path, pipeline: Pipeline, number: int) -> None:
        self.pseudonym = signing(f"member {number}")
        self.shuffling = Shuffling(public(SEAL), "pseudonym.key", 4, 1), self.pseudonym
        super().__init__(folder / f"member-{number}", pipeline)

    def round(self, name: str = "0") -> str:
        return self.envelope("any", QUERY, name).shuffle_round

    def box(self, query_id: str, name: str = "0") -> bytes:
        """Return the box in its reply to the one question, for the round of this name."""
        reply = decode_reply(self.handle(self.frame(query_id, QUERY, name)), limit=2**20)
        if not isinstance(reply, Sealed):
            raise Caught(
                "a silo's reply to a shuffled question is not a box for the shuffler alone"
            )
        return reply.box

    def sent(self, query_id: str, name: str = "0") -> Contribution:
        return open_box(self.box(query_id, name), self.round(name), SEAL)[0]

    def second(self) -> bytes:
        """Another box of its own for the first round, as no gate would make it."""
        first = self.sent("one")
        return encrypt_box(
            replace(first, numbers=first.numbers[::-1].copy()), public(SEAL), self.pseudonym
        )


@SHUFFLED_DEPLOYMENT.probe("sealed reply")
def sealed(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a reply is a box of fixed length on the silo's condition. The same question gets
    the same bytes. Another round has other noise.
    """
    member = Member(folder, pipeline, 0)
    first = member.sent("one")
    again = member.sent("two", "1")
    if len(member.box("one")) != box_length(DIM) or first.numbers.shape != (DIM,):
        raise Caught("a box holds something other than the numbers that were asked for")
    if first.demanded < 4:
        raise Caught(
            f"a box may leave within a total of {first.demanded} silos where its price counts on "
            "3 and 1 may collude"
        )
    if np.array_equal(first.numbers, again.numbers):
        raise Caught("two rounds get the same noise")
    check_retries(member, member.frame("one", QUERY))


@SHUFFLED_DEPLOYMENT.probe("boxes that count")
def boxes_that_count(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Check that a total is of all members once, never of fewer silos than they demand, and of
    nothing but their sum.
    """
    members = [Member(folder, pipeline, i) for i in range(MEMBERS)]
    pool = pipeline.pool(SEAL, [public(member.pseudonym) for member in members])
    boxes = [member.box("one") for member in members]
    for what, few in (
        ("three of four", boxes[:3]),
        ("three, one of them twice,", [*boxes[:3], members[0].second()]),
    ):
        try:
            pool.total(Request(members[0].round(), DIM, tuple(few)))
        except Refused:
            continue
        raise Caught(f"a total of {what} is passed on, though each demands four")
    passed = pool.total(Request(members[0].round(), DIM, tuple(boxes)))
    total = np.sum([open_box(box, members[0].round(), SEAL)[0].numbers for box in boxes], axis=0)
    if passed.totals.shape != (DIM,) or not np.array_equal(passed.totals, total):
        raise Caught(f"{passed.totals.size} numbers are passed on where the total has {DIM}")


@SHUFFLED_DEPLOYMENT.probe("one total for a round")
def one_total(pipeline: Pipeline, seed: int, folder: Path) -> None:
    """Whatever boxes are brought, a round has one total."""
    members = [Member(folder, pipeline, i) for i in range(MEMBERS)]
    (folder / "rounds.db").touch(0o600)
    store = pipeline.store.create(folder / "rounds.db", seal=public(SEAL), sign=public(SIGN))
    pool = pipeline.pool(SEAL, [public(member.pseudonym) for member in members])
    door = ShufflerDoor(
        pool, store, key=SIGN, askers=[public(SERVER)], rounds_per_hour=10, limit=2**20
    )
    first = [member.box("one") for member in members]
    others = [*first[:3], members[3].second()]
    one, two = (
        door.handle(encode_request(Request(members[0].round(), DIM, tuple(boxes)), SERVER))
        for boxes in (first, others)
    )
    if not isinstance(decode_outcome(one, limit=2**20, shuffler_key=public(SIGN)), Passed):
        raise Caught("the shuffler passes nothing on")
    if one != two:
        raise Caught("a round is passed on twice, with another box of one silo")
