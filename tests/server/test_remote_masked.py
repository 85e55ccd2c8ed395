"""Masked totals from the server's side, over real gates in this process: sums, silos that drop out,
restarts, journal and budget.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file

from gates import Clock
from silodp.cli.federation_files import problem_of
from silodp.core.errors import BadInput
from silodp.core.mechanisms import Masked
from silodp.core.privacy.accounting import gdp_epsilon
from silodp.core.protocol.codec import QUERY, Sealed, decode_query, decode_reply, encode_reply
from silodp.core.protocol.masks import add_masked
from silodp.core.protocol.offers import KEYS
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.host.cards import read_card
from silodp.host.keys import read_key
from silodp.pages.runs import read
from silodp.server.journal import Journal
from silodp.server.order import Order
from silodp.server.remote import Timeouts
from silodp.server.remote_masked import MaskedRemote
from silodp.server.run import NetworkRun, plan_order
from silodp.silo.answer.exact import Exact
from silodp.silo.data.reading import read_records
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.daemon import approved_problem
from silodp.silo.service.door import Door
from silodp.silo.service.masking import Masker, Masking, pin
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision

ASKER = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
ORDER = Order("mb-sgd", rounds=5, epsilon=("3.0",), trust="masks", colluding=1, seed=0)
SIZES = (40, 60, 50, 45)
WAITS = Timeouts(deadline=2.0, limit=2.5, retry=1.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


class Hospital:
    """A deployed silo without its daemon: policy, ledger, door."""

    def __init__(self, folder: Path, records: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(records, 2)).round(3), rng.integers(0, 2, records)
        folder.mkdir()
        (folder / "data.csv").write_text(
            "u,v,label\n"
            + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(x.tolist(), y, strict=True))
        )
        about = {
            "label": "label",
            "name": folder.name,
            "epsilon": 20.0,
            "delta": 1e-5,
            "model": "logistic",
        }
        asker, self.registry = ASKER.public_key().public_bytes_raw().hex(), folder / "registry"
        made = provision(
            folder / "silo",
            data=folder / "data.csv",
            **about,
            askers=[asker],
            masking=Masking((), 1, 3),
            registry=self.registry,
            queries_per_hour=100_000,
        )
        self.policy, self.name, self.key = Path(made.policy), made.name, made.key
        self.card = read_card(self.policy.parent / "silo.json")

    def start(self) -> None:
        """A new process: its keys of runs are gone."""
        place, policy, masking = (
            DaemonSettings.load(self.policy),
            Policy.load(self.policy),
            Masking.load(self.policy),
        )
        own, key = read_records(place, None), read_key(place.key)
        self.problem = approved_problem(place, own.x.shape[-1], None)
        self.ledger = DurableLedger.open(Path(place.ledger))
        masks = Masker(masking, key, policy.definition)
        self.door = Door(
            policy,
            self.problem,
            own.records(),
            self.ledger,
            signing_key=key,
            trust=masks,
            known_by=own.known_by,
            registry=self.registry,
        )

    def charges(self) -> list:
        return [entry for entry in self.ledger.entries() if entry.act == "charge"]


class Carrier:
    """Brings frames to the doors. `lost(name, frame, count)` says whether a frame is lost on its
    way, `late` whether its reply is.
    """

    def __init__(self, hospitals: list[Hospital]) -> None:
        self.doors = {h.name: h for h in hospitals}
        self.gone: set[str] = set()
        self.lost = self.late = lambda name, frame: False
        self.replies: list[tuple[str, bytes, bytes]] = []

    def names(self) -> list[str]:
        return [name for name in self.doors if name not in self.gone]

    def exchange(self, frames, timeout):
        came = {}
        for name, frame in frames.items():
            if name in self.gone or self.lost(name, frame):
                continue
            reply = self.doors[name].door.handle(frame)
            self.replies.append((name, frame, reply))
            if not self.late(name, frame):
                came[name] = reply
        return came


@pytest.fixture
def hospitals(tmp_path):
    made = [Hospital(tmp_path / f"silo-{i}", n, i) for i, n in enumerate(SIZES)]
    for one in made:
        pin(one.policy, [f"{other.name} {other.key}" for other in made if other is not one])
        one.start()
    return made


def conduct(hospitals, place, carrier, order=ORDER, **more) -> NetworkRun:
    cards = [h.card for h in hospitals]
    return NetworkRun(
        cards, problem_of(cards[0], order), order, carrier, place, key=ASKER, timeouts=WAITS, **more
    )


def run(hospitals, place, carrier, order=ORDER) -> dict:
    made = conduct(hospitals, place, carrier, order)
    for _ in made:
        pass
    return made.summary


def attempts(hospitals) -> list[int]:
    return [len(h.charges()) for h in hospitals]


def of_round(frame: bytes, round: str, attempt: int = 0) -> bool:
    if frame[:4] != QUERY:
        return False
    envelope = decode_query(frame, limit=10**6)[0]
    return (envelope.round, envelope.attempt) == (round, attempt)


# --- sums ----------------------------------------------------------------------------------------


def test_a_run_finishes_and_every_ledger_has_what_the_plan_says(hospitals, tmp_path):
    carrier = Carrier(hospitals)
    summary = run(hospitals, tmp_path / "run", carrier)
    assert summary["ended"] == "finished"
    assert attempts(hospitals) == [5] * 4
    plan = plan_order(ORDER, [h.card for h in hospitals]).plan
    for hospital, told in zip(hospitals, summary["silos"], strict=True):
        z = float(plan.mechanisms["minibatch"].noise_multiplier)
        made, own = (gdp_epsilon(5**0.5 / (z * n**0.5), hospital.card.delta) for n in (3, 1))
        assert hospital.ledger.spent() == told["spent_epsilon_at_most"] <= 3.0
        assert hospital.ledger.local() == told["local_epsilon_at_most"]
        assert hospital.ledger.spent() == pytest.approx(made, rel=1e-9)
        assert hospital.ledger.local() == pytest.approx(own, rel=1e-9)
    assert plan.mechanisms["minibatch"].counted == 3


def test_the_total_is_that_of_the_gates_own_numbers_and_the_server_holds_no_silos_numbers(
    hospitals, tmp_path, monkeypatch
):
    """Every byte that the server or a courier sees is compared with every silo's numbers."""
    numbers: list[torch.Tensor] = []
    kept = Exact.answer
    monkeypatch.setattr(
        Exact, "answer", lambda self, *given: numbers.append(kept(self, *given)) or numbers[-1]
    )
    carrier = Carrier(hospitals)
    run(hospitals, tmp_path / "run", carrier, replace(ORDER, rounds=2))
    boxes = [
        got.box
        for _, _, raw in carrier.replies
        if raw[:4] == b"SDPR" and isinstance(got := decode_reply(raw, limit=10**6), Sealed)
    ]
    assert len(boxes) == len(numbers) == 8
    for start in (0, 4):
        total = add_masked(boxes[start : start + 4], 32)
        assert total.tolist() == torch.stack(numbers[start : start + 4]).sum(0)[0, 0].tolist()
    seen = b"".join(frame + reply for _, frame, reply in carrier.replies)
    assert not any(
        c[0, 0].numpy().astype(kind).tobytes() in seen
        for c in numbers
        for kind in ("<i4", "<i8", "<f8")
    )


# --- silos that drop out -------------------------------------------------------------------------


def test_a_silo_that_is_not_there_is_in_no_table_and_nobody_pays_twice(hospitals, tmp_path):
    carrier = Carrier(hospitals)
    carrier.gone = {"silo-1"}
    summary = run(hospitals, tmp_path / "run", carrier, replace(ORDER, least=3))
    assert summary["ended"] == "finished"
    assert attempts(hospitals) == [5, 0, 5, 5]
    assert summary["silos"][1]["dropped"] == {"absent": 5}
    assert summary["silos"][1]["spent_epsilon_at_most"] == 0.0


def test_a_silo_that_drops_in_mid_round_costs_the_others_one_more_attempt_with_fresh_noise(
    hospitals, tmp_path
):
    carrier = Carrier(hospitals)

    def killed(name, frame):
        if name == "silo-2" and of_round(frame, "2"):
            carrier.gone.add(name)
        return name in carrier.gone

    carrier.lost = killed
    summary = run(hospitals, tmp_path / "run", carrier, replace(ORDER, least=3, drops=0.2))
    assert summary["ended"] == "finished"
    assert attempts(hospitals) == [6, 6, 2, 6]
    told = {silo["name"]: silo for silo in summary["silos"]}
    for hospital in hospitals:
        assert hospital.ledger.spent() <= told[hospital.name]["spent_epsilon_at_most"] <= 3.0
    assert told["silo-0"]["spent_epsilon_at_most"] == hospitals[0].ledger.spent()
    rounds = {json.loads(entry.event)["round"] for entry in hospitals[0].charges()}
    assert len(rounds) == 6


def test_a_run_with_a_tenth_of_drops_finishes_within_the_budget_that_was_planned_for_it(
    hospitals, tmp_path
):
    carrier = Carrier(hospitals)
    carrier.late = lambda name, frame: (
        name == "silo-3" and any(of_round(frame, r) for r in ("4", "15"))
    )  # two rounds of twenty
    summary = run(
        hospitals, tmp_path / "run", carrier, replace(ORDER, rounds=20, least=3, drops=0.1)
    )
    assert summary["ended"] == "finished"
    assert attempts(hospitals)[:3] == [22] * 3
    for hospital, told in zip(hospitals, summary["silos"], strict=True):
        assert hospital.ledger.spent() <= told["spent_epsilon_at_most"] <= 3.0


@pytest.mark.parametrize("least", [3, None])
def test_a_gate_that_was_restarted_gives_a_new_key_and_goes_on(hospitals, tmp_path, least):
    carrier = Carrier(hospitals)

    def restarted(name, frame):
        if name == "silo-1" and of_round(frame, "1"):
            hospitals[1].start()
        return False

    carrier.lost = restarted
    summary = run(hospitals, tmp_path / "run", carrier, replace(ORDER, least=least))
    assert summary["ended"] == "finished"
    assert attempts(hospitals) == [6, 5, 6, 6]
    assert all(silo["answered"] == 5 for silo in summary["silos"])


def test_a_cohort_that_breaks_too_often_or_is_too_small_ends_the_run_with_all_charges_told(
    hospitals, tmp_path
):
    carrier = Carrier(hospitals)
    carrier.late = lambda name, frame: (
        frame[:4] == QUERY
        and of_round(frame, "2", decode_query(frame, limit=10**6)[0].attempt)
        and name == "silo-0"
    )
    carrier.names = lambda: list(carrier.doors)
    made = conduct(hospitals, tmp_path / "run", carrier, replace(ORDER, least=3))
    for _ in made:
        pass
    assert "has broken 3 times" in made.summary["ended"]
    for hospital, told in zip(hospitals, made.summary["silos"], strict=True):
        assert hospital.ledger.spent() <= told["spent_epsilon_at_most"]
    carrier.gone = {"silo-1", "silo-2"}
    small = conduct(hospitals, tmp_path / "small", carrier, replace(ORDER, least=3))
    with pytest.raises(BadInput, match="2 of 4 silos"):
        list(small)


def test_the_quorum_of_a_total_leaves_somebody_to_hide_among(hospitals):
    cards = [h.card for h in hospitals]
    with pytest.raises(BadInput, match="no honest silo"):
        plan_order(replace(ORDER, least=2), cards)
    with pytest.raises(BadInput, match="policy requires a price against 1"):
        plan_order(replace(ORDER, colluding=0), cards)


# --- journal -------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", ["keys", "some answers", "all answers"])
def test_a_killed_server_goes_on_where_it_was_and_no_silo_pays_twice(hospitals, tmp_path, when):
    carrier, kept = Carrier(hospitals), Carrier.exchange

    class Dying(Carrier):
        def exchange(self, frames, timeout):
            asked = any(of_round(frame, "2") for frame in frames.values())
            if asked and when == "keys":
                raise Killed
            if asked and when == "some answers":
                frames = {name: frame for name, frame in frames.items() if name != "silo-3"}
            came = kept(self, frames, timeout)
            if asked:
                raise Killed
            return came

    with pytest.raises(Killed):
        run(hospitals, tmp_path / "run", Dying(hospitals))
    for hospital, shown in zip(hospitals, read(tmp_path / "run").silos, strict=True):
        assert hospital.ledger.spent() <= shown.spent * (1 + 1e-9)
    summary = run(hospitals, tmp_path / "run", carrier)
    assert summary["ended"] == "finished"
    assert attempts(hospitals) == [5] * 4
    assert (summary["questions"], summary["iterates"]) == (5, 5)
    whole = run(hospitals, tmp_path / "run", carrier)  # all of it from the journal
    assert attempts(hospitals) == [5] * 4
    assert whole["iterates"] == 5


def test_a_server_killed_at_the_recalibration_goes_on_there_and_all_of_it_is_the_budget(
    hospitals, tmp_path
):
    class Dying(Carrier):
        def exchange(self, frames, timeout):
            came = super().exchange(frames, timeout)
            if any(of_round(frame, "5") for frame in frames.values()):
                raise Killed
            return came

    order = replace(ORDER, recalibration=0.1)
    with pytest.raises(Killed):
        run(hospitals, tmp_path / "run", Dying(hospitals), order)
    plan = plan_order(order, [h.card for h in hospitals]).plan
    models = []
    for _ in range(2):  # the second run reads all of it from the journal
        summary = run(hospitals, tmp_path / "run", Carrier(hospitals), order)
        assert summary["ended"] == "finished"
        assert summary["questions"] == summary["iterates"] + 1 == 6
        assert summary["recalibration"]["share"] == 0.1
        assert attempts(hospitals) == [6] * 4
        for hospital, told in zip(hospitals, summary["silos"], strict=True):
            assert hospital.ledger.spent() == told["spent_epsilon_at_most"] <= 3.0
            assert hospital.ledger.spent() == pytest.approx(float(plan.spent().max()), rel=1e-9)
        assert (tmp_path / "run/replies").stat().st_size == 0, "no silo's answer is kept"
        models.append(load_file(tmp_path / "run/model.safetensors"))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_an_offer_of_an_earlier_round_that_comes_late_is_not_the_next_ones(hospitals, tmp_path):
    carrier, first, rounds = Carrier(hospitals), dict[str, bytes](), []
    kept = carrier.exchange

    def late(frames, timeout):
        came = kept(frames, timeout)
        if all(frame[:4] == KEYS for frame in frames.values()) and "silo-0" in came:
            rounds.append(came["silo-0"])
            first.setdefault("silo-0", came["silo-0"])
            came["silo-0"] = first["silo-0"] if len(rounds) == 2 else came["silo-0"]
        return came

    carrier.exchange = late
    assert run(hospitals, tmp_path / "run", carrier)["ended"] == "finished"
    assert attempts(hospitals) == [5] * 4, (
        "the old key was asked for again, before anybody was asked for more"
    )


def test_a_question_outside_a_run_is_repeated_and_not_paid_again(hospitals, tmp_path):
    """As an evaluation asks it, killed before it has read the answers: a gate's key is for one
    answer, so the journal must have the table.
    """
    carrier = Carrier(hospitals)
    mechanism = Masked("anchor", 1.0, 4.0, counted=3)
    query = Query(Grad(torch.zeros(1, hospitals[0].problem.dim)), mechanism)

    def ask(carrier):
        journal = Journal(tmp_path / "journal", "e" * 32, "evaluation")
        try:
            cards = [h.card for h in hospitals]
            return MaskedRemote(
                cards, carrier, run="e" * 32, key=ASKER, timeouts=WAITS, quorum=4, journal=journal
            ).ask(query, range(4))
        finally:
            journal.close()

    class Dying(Carrier):
        def exchange(self, frames, timeout):
            came = super().exchange(frames, timeout)
            if any(frame[:4] == QUERY for frame in frames.values()):
                raise Killed
            return came

    with pytest.raises(Killed):
        ask(Dying(hospitals))
    found, again = ask(carrier), ask(carrier)
    assert torch.equal(found.value, again.value)
    assert attempts(hospitals) == [1] * 4


def test_keys_that_are_not_the_silos_own_for_this_run_do_not_count(hospitals, tmp_path):
    """A courier that swaps replies, or brings those of an earlier run, is as good as silence."""
    carrier = Carrier(hospitals)
    old: dict[str, bytes] = {}
    kept = carrier.exchange

    def swapped(frames, timeout):
        came = kept(frames, timeout)
        if all(frame[:4] == KEYS for frame in frames.values()):
            if not old:
                old.update(came)
            elif "silo-0" in came:
                came["silo-0"] = old["silo-0"]
        return came

    run(hospitals, tmp_path / "first", carrier, replace(ORDER, rounds=1, epsilon=("1",)))
    carrier.exchange = swapped
    old.clear()
    run(hospitals, tmp_path / "second", carrier, replace(ORDER, rounds=1, epsilon=("1",)))
    summary = run(
        hospitals, tmp_path / "third", carrier, replace(ORDER, rounds=1, least=3, epsilon=("1",))
    )
    assert summary["silos"][0]["dropped"] == {"absent": 1}
    assert attempts(hospitals) == [2, 3, 3, 3]


def test_a_run_that_a_spoilt_total_ended_tells_the_same_charges_when_it_is_resumed(
    hospitals, tmp_path
):
    class Lying(Carrier):
        def exchange(self, frames, timeout):
            came = super().exchange(frames, timeout)
            if of_round(frames.get("silo-3", b""), "2"):
                said = decode_reply(came["silo-3"], limit=10**6)
                own = read_key(DaemonSettings.load(hospitals[3].policy).key)
                came["silo-3"] = encode_reply(replace(said, box=b"\xfe" * len(said.box)), own)
            return came

    for _ in range(2):  # the second time all of it is from the journal
        summary = run(hospitals, tmp_path / "run", Lying(hospitals))
        assert "beyond what its cohort can add up to" in summary["ended"]
        assert attempts(hospitals) == [3] * 4
        for hospital, told in zip(hospitals, summary["silos"], strict=True):
            assert hospital.ledger.spent() <= told["spent_epsilon_at_most"] * (1 + 1e-9)
