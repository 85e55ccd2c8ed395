"""A run that cannot be paid for does not start: all gates hold what it needs or none does, over
real gates and ledgers.
"""

import json
import time
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gates import ASKER, PATIENCE, three_gates
from silodp.core.errors import BadInput
from silodp.core.protocol.codec import Refusal, encode_reply
from silodp.core.protocol.quote import HoldRequest, encode_hold
from silodp.server.order import Order
from silodp.server.quote import RunHolds, run_events
from silodp.server.remote import Timeouts
from silodp.server.run import NetworkRun
from silodp.silo.ledger.reserve import listed, release

OTHER = Ed25519PrivateKey.from_private_bytes(bytes([8]) * 32)
KEYS = tuple(key.public_key().public_bytes_raw().hex() for key in (ASKER, OTHER))
ORDER = Order("spider", rounds=4, phase=2, epsilon=("1.0",))
QUICK = Timeouts(deadline=PATIENCE, limit=PATIENCE, retry=PATIENCE)


pytestmark = pytest.mark.xdist_group(
    "run-holds"
)  # one set of gates for all, whose budgets each test leaves behind


@pytest.fixture(scope="module")
def gates():
    with three_gates(epsilon=10.0, askers=KEYS, sees_left=KEYS[:1], queries_per_run=10_000) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_held(gates):
    yield
    for gate in gates.gates:
        release(ledger := gate.ledger(), [o.hold.id for o in listed(ledger)])


def conduct(
    gates, folder, order=ORDER, *, key=ASKER, carrier=None, timeouts=QUICK, **more
) -> NetworkRun:
    return NetworkRun(
        gates.cards,
        gates.problem,
        order,
        carrier or gates.direct(),
        folder,
        key=key,
        timeouts=timeouts,
        **more,
    )


def acts(gates) -> list[list[str]]:
    return [[entry.act for entry in gate.ledger().entries()] for gate in gates.gates]


def held(gates) -> list[float]:
    return [sum(o.share for o in listed(gate.ledger())) for gate in gates.gates]


def holder(gates, run, key, epsilon, carrier=None, **more) -> RunHolds:
    made = conduct(gates, more.pop("folder"), replace(ORDER, epsilon=(str(epsilon),)), key=key)
    made._journal.close()
    made._spending.record.close()
    about = {"cards": gates.cards, "timeouts": QUICK, "quorum": 1} | more
    return RunHolds(
        carrier=carrier or gates.direct(), plan=made.made.plan, run=run, key=key, **about
    )


def test_a_run_holds_what_it_needs_spends_it_and_releases_the_rest(gates, tmp_path):
    told, before = {}, [gate.ledger().used() for gate in gates.gates]
    seen = []
    run = conduct(gates, tmp_path / "run", held=told.update)
    for progress in run:
        seen.append(held(gates))
        assert progress.dropped == {}
    assert list(told) == ["silo-0", "silo-1", "silo-2"]
    for i, gate in enumerate(gates.gates):
        spent = gate.ledger().used() - before[i]
        assert told[f"silo-{i}"].needed == pytest.approx(spent, rel=1e-6), (
            "it held what it then spent"
        )
        assert [round(row[i] / spent, 6) for row in seen] == [0.6, 0.5, 0.1, 0.0], (
            "a charge takes from the hold"
        )
    assert held(gates) == [0, 0, 0]
    assert all(row[-1] == "release" for row in acts(gates))


def test_a_run_that_one_silo_cannot_pay_for_leaves_no_charge_no_hold_and_no_folder(gates, tmp_path):
    blocker = holder(gates, "blocker", OTHER, 9.0, folder=tmp_path / "b")
    frame = blocker._frame(
        "silo-2"
    )  # the last in the canonical order: the others have said yes by then
    blocker._carrier.exchange({"silo-2": frame}, PATIENCE)
    before = acts(gates)
    pauses: list[float] = []
    taker = holder(gates, "taker", ASKER, 9.0, folder=tmp_path / "t", pause=pauses.append)
    with pytest.raises(
        BadInput,
        match=(
            r"needs \d\d\.\d % of the budget of silo silo-2 .*, and \d+\.\d % is left, and "
            r"other runs have reserved some"
        ),
    ):
        taker.keep()
    assert len(pauses) == 4, "it tried again, after random pauses"
    assert len(set(pauses)) == 4
    assert all(0 <= pause <= 8 for pause in pauses)
    assert held(gates)[:2] == [0, 0]
    for was, is_, kinds in zip(
        before, acts(gates), ({"hold", "release"}, {"hold", "release"}, set()), strict=True
    ):
        assert set(is_[len(was) :]) == kinds
    with pytest.raises(BadInput, match="other runs have reserved some of it"):
        list(conduct(gates, tmp_path / "run", replace(ORDER, epsilon=("9.0",))))
    assert not (tmp_path / "run").exists()
    blocker.release()
    with pytest.raises(
        BadInput, match=r"silo silo-0 \(epsilon 10\), and \d+\.\d % is left; nothing was charged"
    ):
        list(conduct(gates, tmp_path / "run", replace(ORDER, epsilon=("10.0",))))
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match=r"which has less left; nothing was charged or reserved"):
        list(conduct(gates, tmp_path / "run", replace(ORDER, epsilon=("10.0",)), key=OTHER))
    assert held(gates) == [0, 0, 0]
    assert [row.count("charge") for row in acts(gates)] == [row.count("charge") for row in before]


def test_a_run_of_two_servers_that_want_it_all_one_gets_it_all(gates, tmp_path):
    first = holder(gates, "first", ASKER, 7.0, folder=tmp_path / "1")
    first.keep()
    waited = []

    def ends(seconds: float) -> None:
        waited.append(seconds)
        first.release()

    second = holder(gates, "second", OTHER, 7.0, folder=tmp_path / "2", pause=ends)
    second.keep()
    assert len(waited) == 1
    assert {o.hold.run for gate in gates.gates for o in listed(gate.ledger())} == {"second"}
    second.release()


def test_a_resumed_run_holds_what_remains_and_one_whose_hold_is_gone_goes_on_by_the_filter(
    gates, tmp_path
):
    run = iter(conduct(gates, tmp_path / "run"))
    next(run)
    needed = held(gates)
    for gate in gates.gates:  # as if the server had been killed, and the hold had run out
        release(gate.ledger(), [o.hold.id for o in listed(gate.ledger())])
    assert next(run).dropped == {}, "charges go by the filter"
    run.close()
    told = {}
    again = conduct(gates, tmp_path / "run", held=told.update)
    assert len(list(again)) == 4
    assert again.summary["ended"] == "finished"
    assert [told[f"silo-{i}"].needed for i in range(3)] == pytest.approx(
        [share * 5 / 6 for share in needed], rel=1e-6
    )
    for gate in gates.gates:
        assert len(set(gate.charges(again.run))) == len(gate.charges(again.run)) == 4


def test_a_run_that_is_refused_on_its_way_says_what_was_spent(gates, tmp_path):
    """A run of which nobody answers the first question has spent something all the same, and says
    how much at each silo.
    """

    class Deaf:
        def __init__(self):
            self.gates = gates.direct()

        def exchange(self, frames, timeout):
            replies = self.gates.exchange(frames, timeout)
            return {name: reply for name, reply in replies.items() if frames[name][:4] == b"SDPH"}

        def names(self):
            return self.gates.names()

    timeouts = Timeouts(deadline=1.0, limit=1.0, retry=1.0)
    with pytest.raises(
        BadInput,
        match=(
            r"spent at most: silo-0 epsilon 0\.\d+, silo-1 epsilon 0\.\d+, silo-2 epsilon "
            r"0\.\d+; it can be resumed"
        ),
    ):
        list(conduct(gates, tmp_path / "run", carrier=Deaf(), timeouts=timeouts))
    assert (tmp_path / "run/journal").exists()
    assert held(gates) == [0, 0, 0]
    assert len(list(conduct(gates, tmp_path / "run"))) == 4


@pytest.mark.parametrize("code", ["size", "peer"])
def test_a_refusal_that_names_no_request_is_as_silence_so_that_no_courier_can_veto_a_run(
    gates, tmp_path, code
):
    """A gate signs these for whoever connects: one that was kept and is repeated must not stop
    every run.
    """
    key = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
    cards = [
        replace(card, key=key.public_key().public_bytes_raw().hex())
        if card.name == "silo-1"
        else card
        for card in gates.cards
    ]

    class Courier:
        def exchange(self, frames, timeout):
            kept = encode_reply(Refusal(code), key)
            return {name: kept for name in frames if name == "silo-1"} | gates.direct().exchange(
                {name: frame for name, frame in frames.items() if name != "silo-1"}, timeout
            )

    made = holder(
        gates,
        "vetoed",
        ASKER,
        1.0,
        Courier(),
        folder=tmp_path / "v",
        cards=cards,
        timeouts=Timeouts(0.2, 0.2, 0.2),
    )
    made.keep()
    assert sorted(made.held) == ["silo-0", "silo-2"]
    made.release()


def test_a_hold_that_was_released_is_not_taken_again_by_whoever_repeats_its_bytes(gates, tmp_path):
    made = holder(gates, "replayed", ASKER, 1.0, folder=tmp_path / "r")
    frame = made._frame("silo-0")

    def told(sent: bytes):
        raw = gates.direct().exchange({"silo-0": sent}, PATIENCE)["silo-0"]
        return made._opened(gates.cards[0], made._open["silo-0"], sent, raw)

    assert told(frame).code == ""
    made.release()
    made._open["silo-0"] = "anything"
    assert told(frame) == "lapsed"
    for key, wanted in ((Ed25519PrivateKey.generate(), "asker"), (ASKER, "silo")):
        request = HoldRequest(
            "silo-1", "r", "h", gates.cards[0].definition, 1, made._events["silo-0"]
        )
        sent = encode_hold(request, key)
        assert told(sent) == wanted
    assert held(gates) == [0, 0, 0]


def test_holds_are_renewed_at_half_their_time(gates, tmp_path):
    made = holder(gates, "long", ASKER, 1.0, folder=tmp_path / "r")
    made.keep()
    ids = dict(made._open)
    made.keep()
    assert made._open == ids
    made._again = time.monotonic() - 1
    made.keep()
    assert not set(made._open.values()) & set(ids.values())
    assert [len(listed(gate.ledger())) for gate in gates.gates] == [1, 1, 1]
    made.release()


def test_a_run_whose_renewal_got_lost_is_released_all_the_same(gates, tmp_path):
    made = holder(gates, "renewed", ASKER, 1.0, folder=tmp_path / "r")
    made.keep()
    for name in ("silo-0", "silo-1", "silo-2"):
        late = made._frame(name)  # asked for, and not carried
    made.release()
    assert held(gates) == [0, 0, 0]
    assert (
        made._opened(
            gates.cards[2],
            made._open.get("silo-2", ""),
            late,
            gates.direct().exchange({"silo-2": late}, PATIENCE)["silo-2"],
        )
        == "lapsed"
    )
    assert held(gates) == [0, 0, 0]


def test_the_events_of_a_plan_are_what_the_run_is_charged(gates, tmp_path):
    for order in (
        ORDER,
        replace(ORDER, algorithm="local-sgd", local_steps=3),
        replace(ORDER, algorithm="mb-sgd", sampling="disjoint", rounds=3),
    ):
        run = conduct(gates, tmp_path / order.algorithm, replace(order, epsilon=("0.3",)))
        planned = run_events(run.made.plan, 1)
        list(run)
        charged = [
            json.loads(e.event)
            for e in gates[1].ledger().entries()
            if e.act == "charge" and e.run == run.run
        ]
        assert sum(event.count for _, event in planned) == sum(event["count"] for event in charged)
        assert {event.noise_multiplier.hex() for _, event in planned} == {
            event["noise_multiplier"] for event in charged
        }
