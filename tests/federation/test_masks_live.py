"""Masked totals over NVFlare, Flower and sockets with real processes: a gate is killed in
mid-round, and the run goes on without it. With SILODP_LONG=1.
"""

import itertools
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from gates import Clock, Unhurried, shell
from silodp.cli.federation_files import carrier_of, problem_of, read_key
from silodp.core.privacy.accounting import GDP, gdp_epsilon
from silodp.core.protocol.codec import QUERY, Sealed, decode_query, decode_reply
from silodp.core.protocol.masks import add_masked, read_table
from silodp.core.protocol.offers import KEYS
from silodp.host.cards import read_card
from silodp.server.estimates.recalibration import KIND
from silodp.server.order import Order
from silodp.server.remote import Timeouts
from silodp.server.run import NetworkRun, plan_order
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.policy import DaemonSettings

pytestmark = [
    pytest.mark.xdist_group("federation-masks"),
    pytest.mark.skipif(
        "SILODP_LONG" not in os.environ,
        reason="a federation over an engine takes a minute to start",
    ),
]
ENGINES = {"direct": "silodp", "nvflare": "nvflare", "flower": "flwr"}
ROUNDS, FATAL, VICTIM = 5, "2", "silo-2"
WAITS = Timeouts(deadline=2.0, limit=2.5, retry=1.0)


class Wire:
    """The engine's hub, of which every frame and reply is kept; the victim's gate is killed once a
    question of the fatal round lies signed on the table, with the victim's key in it, and before
    that question is sent."""

    def __init__(self, carrier, gate: int) -> None:
        self._carrier, self._gate, self.names = Unhurried(carrier), gate, carrier.names
        self.seen: list[tuple[str, bytes, bytes]] = []

    def exchange(self, frames, timeout):
        if self._gate and all(
            frame[:4] == QUERY and of_round(frame) == (FATAL, 0) for frame in frames.values()
        ):
            envelope = decode_query(frames[VICTIM], limit=2**20)[0]
            assert len(read_table(envelope.cohort)) == len(frames)
            os.kill(self._gate, signal.SIGKILL)
            self._gate = 0
        replies = self._carrier.exchange(frames, timeout)
        self.seen += [(name, frames[name], reply) for name, reply in replies.items()]
        return replies


def of_round(frame: bytes) -> tuple[str, int]:
    envelope = decode_query(frame, limit=2**20)[0]
    return envelope.round, envelope.attempt


def uniform(words: np.ndarray) -> bool:
    """Return whether the bytes of 32-bit words look like those of a uniform law."""
    counts = np.bincount(np.frombuffer(words.astype("<i4").tobytes(), np.uint8), minlength=256)
    return chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize(
    ("engine", "silos", "colluding"),
    [
        ("nvflare", 3, 0),
        ("nvflare", 10, 1),
        ("flower", 3, 0),
        ("flower", 10, 1),
        ("direct", 3, 0),
    ],
)
def test_a_gate_killed_in_mid_round_costs_the_others_one_attempt_and_nobody_holds_a_silos_counts(
    engine, silos, colluding, monkeypatch
):
    pytest.importorskip(ENGINES[engine])
    Clock(monkeypatch)
    home = Path(tempfile.mkdtemp(prefix="silodp-"))
    folder = home / "f"
    try:
        words = (
            "--silos",
            silos,
            "--data",
            "wbcd",
            "--model",
            "mlp:4",
            "--engine",
            engine,
            "--epsilon",
            20,
            "--folder",
            folder,
        )
        shell("federation", "up", "--trust", "masks", "--colluding", colluding, *words, "--json")
        state = json.loads((folder / "federation.json").read_text())
        cards = [read_card(Path(policy).parent / "silo.json") for policy in state["silos"].values()]
        order = Order(
            "mb-sgd",
            rounds=ROUNDS,
            epsilon=("3.0",),
            trust="masks",
            colluding=colluding,
            least=silos - 1,
            drops=1 / ROUNDS,
            recalibration=0.1,
        )
        wire = Wire(carrier_of(folder, state), state["processes"][f"gate {VICTIM}"])
        run = NetworkRun(
            cards,
            problem_of(cards[0], order),
            order,
            wire,
            home / "run",
            key=read_key(folder / "asker.key"),
            timeouts=WAITS,
        )
        assert len(list(run)) == ROUNDS
        check_ledgers(run.summary, order, cards, state)
        check_bytes(wire.seen, silos)
        kept = b"".join(path.read_bytes() for path in (home / "run").rglob("*") if path.is_file())
        assert not any(
            box in kept for some in boxes(wire.seen).values() for box in some.values()
        ), "an ended run keeps totals, no silo's answer"
        assert all(raw in kept for _, frame, raw in wire.seen if frame[:4] == KEYS), (
            "and this test would see one there"
        )
    finally:
        if (folder / "federation.json").exists():
            shell("federation", "down", "--folder", folder)
        shutil.rmtree(home)


def check_ledgers(summary: dict, order: Order, cards: list, state: dict) -> None:
    """Every survivor has paid for each round, one attempt more and the recalibration, at the plan's
    price and within it; the victim for what it had answered.
    """
    assert summary["ended"] == "finished"
    plan = plan_order(order, cards).plan
    events = {asked.kind: asked.event.of(0) for asked in plan.asked}
    assert list(events) == ["minibatch", KIND]
    assert [plan.count(kind, 0) for kind in events] == [ROUNDS + 1, 2]
    for card, told in zip(cards, summary["silos"], strict=True):
        ledger = DurableLedger.open(Path(DaemonSettings.load(state["silos"][card.name]).ledger))
        ledger.verify()
        charges = [entry for entry in ledger.entries() if entry.act == "charge"]
        price, last = (
            GDP().price(event, np.asarray(card.records))[1].item() for event in events.values()
        )
        if card.name == VICTIM:
            asked = [price] * int(FATAL)
        else:
            asked = [price] * (ROUNDS + 1) + [last]
        assert [entry.amount for entry in charges] == asked
        spent = gdp_epsilon(sum(asked) ** 0.5, card.delta)
        assert ledger.spent() == pytest.approx(spent, rel=1e-9)
        assert ledger.spent() <= told["spent_epsilon_at_most"] <= 3.0
        if card.name != VICTIM:
            assert ledger.spent() == told["spent_epsilon_at_most"], (
                "by the ledger and the run the same"
            )


def boxes(seen: list[tuple[str, bytes, bytes]]) -> dict[tuple[str, int], dict[str, bytes]]:
    """By round and attempt: the masked answers of each silo."""
    found: dict[tuple[str, int], dict[str, bytes]] = {}
    for name, frame, raw in seen:
        if frame[:4] == QUERY and isinstance(reply := decode_reply(raw, limit=2**20), Sealed):
            found.setdefault(of_round(frame), {})[name] = reply.box
    return found


def check_bytes(seen: list[tuple[str, bytes, bytes]], silos: int) -> None:
    """Chi-square of the bytes of sums that lack an answer, one, two and all but one of those that
    came; the whole sums are plain.
    """
    found = boxes(seen)
    assert {frame[:4] for _, frame, _ in seen} >= {KEYS, QUERY}
    assert {attempt: len(some) for attempt, some in found.items()} == {
        **{(str(r), 0): silos for r in range(int(FATAL))},
        (FATAL, 0): silos - 1,
        (FATAL, 1): silos - 1,
        **{(str(r), 0): silos - 1 for r in range(int(FATAL) + 1, ROUNDS + 1)},
    }
    for lacking in {1, 2, silos - 2}:
        sums = [
            add_masked(part, 32)
            for attempt, some in found.items()
            for part in itertools.islice(itertools.combinations(some.values(), lacking), 20)
            if lacking < len(some) or attempt == (FATAL, 0)
        ]
        assert uniform(np.concatenate(sums)), f"{lacking} answers show something"
    assert uniform(add_masked(list(found[FATAL, 0].values()), 32)), (
        "all that came of the broken cohort"
    )
    for attempt, some in found.items():
        if attempt != (FATAL, 0):
            total = add_masked(list(some.values()), 32)
            assert not uniform(total), "and a whole total is seen by this test"
            assert int(abs(total).max()) < 2**30
