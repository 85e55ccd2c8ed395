"""One command starts server, couriers and gates as real processes, another trains over them;
ledgers, plan, releases and iterates agree.

The same is asked of every engine. Few rounds: Flower takes seconds for each.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import ssl
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gates import LIMIT, shell
from silodp.cli import app as cli
from silodp.cli.federation_files import carrier_of, problem_of, read_key
from silodp.core.errors import BadInput
from silodp.core.protocol.codec import Answer, decode_reply
from silodp.host.cards import read_card
from silodp.server.approval import check_study
from silodp.server.federation import Everyone, Federation
from silodp.server.journal import Journal
from silodp.server.order import Order
from silodp.server.remote import Remote, Timeouts
from silodp.server.run import plan_order
from silodp.silo.data.reading import read_records
from silodp.silo.data.records import Records
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.policy import DaemonSettings
from silodp.testing.federation import simulated_federation

ENGINES = {"direct": "silodp", "nvflare": "nvflare", "flower": "flwr"}
ORDER = Order("spider", rounds=4, phase=2, epsilon=("3.0",))
SILENT_GATE = Path(__file__).parents[1] / "silent_gate.py"

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    ["silodp.cli.app", "silodp.cli.silo", "silodp.silo.service.daemon", "silodp.server.run"]
)


def processes_of(folder: Path) -> list[str]:
    """Every process of this machine that was started with a word about the folder, or that works in
    it.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{folder}/" in f"{words} {os.readlink(path / 'cwd')}/":
                found.append(f"{path.name}: {words}")
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.xdist_group(f"federation-{name}")) for name in ENGINES
    ],
)
def federation(request):
    """What `up` says of three silos on WBCD; afterwards `down` has left no process of it."""
    pytest.importorskip(ENGINES[request.param])
    home = Path(tempfile.mkdtemp(prefix="silodp-"))
    folder = home / "f"
    try:
        words = (
            "--silos",
            3,
            "--data",
            "wbcd",
            "--model",
            "logistic",
            "--engine",
            request.param,
            "--folder",
            folder,
            "--json",
        )
        made = json.loads(shell("federation", "up", *words))
        state = json.loads((folder / "federation.json").read_text())
        cards = [read_card(Path(policy).parent / "silo.json") for policy in state["silos"].values()]
        policies = list(state["silos"].values())
        yield SimpleNamespace(
            folder=folder,
            engine=request.param,
            made=made,
            state=state,
            cards=cards,
            policies=policies,
            problem=problem_of(cards[0], Order()),
        )
        assert len(processes_of(folder)) >= len(made["processes"]), "there is something to stop"
    finally:
        if (folder / "federation.json").exists():
            assert "Stopped" in shell("federation", "down", "--folder", folder)
        deadline = time.monotonic() + LIMIT  # a process that was killed takes a moment to be gone
        while (left := processes_of(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert left == []
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def trained(federation):
    """The summary of a run by `silodp federation run`."""
    order = (
        "--algorithm",
        "spider",
        "--epsilon",
        *ORDER.epsilon,
        "--rounds",
        ORDER.rounds,
        "--phase",
        ORDER.phase,
    )
    return json.loads(
        shell(
            "federation",
            "run",
            "--folder",
            federation.folder,
            *order,
            "--quorum",
            3,
            "--retry",
            30,
            "--json",
        )
    )


def test_one_command_starts_every_process_and_each_side_of_the_network_shows_who_it_is(federation):
    made = federation.made
    names = {process["name"] for process in made["processes"]}
    couriers = {card.name for card in federation.cards}
    assert {f"gate {name}" for name in couriers} <= names
    assert len({process["pid"] for process in made["processes"]}) == len(names)
    assert all(process["runs"] for process in made["processes"])
    assert made["connected"] == sorted(couriers)
    if federation.engine == "nvflare":
        from silodp.wire.nvflare import site as nvflare_site

        assert names > couriers | {"server"}
        kit = federation.folder / "engine/kits/silo-1"
        assert nvflare_site.explain(kit).startswith("accepted")
        shutil.copytree(kit, federation.folder / "stranger")
        (federation.folder / "stranger/startup/client.crt").unlink()
        assert (
            nvflare_site.explain(federation.folder / "stranger")
            == "refused: the client showed no certificate."
        )
    if federation.engine == "flower":
        assert names > couriers | {"server"}
        server = federation.folder / "engine/server"
        address = ("localhost", int((server / "port").read_text()))
        with pytest.raises(ssl.SSLError):
            shake_hands(ssl.create_default_context(), address)
        shake_hands(ssl.create_default_context(cafile=server / "ca.pem"), address)


def shake_hands(trust: ssl.SSLContext, address: tuple[str, int]) -> None:
    with (
        socket.create_connection(address, 10.0) as line,
        trust.wrap_socket(line, server_hostname=address[0]),
    ):
        pass


def test_a_run_trains_and_every_silo_has_spent_what_the_plan_said_by_a_ledger_that_verifies(
    federation, trained, monkeypatch, capsys
):
    assert (trained["ended"], trained["iterates"], trained["questions"]) == (
        "finished",
        ORDER.rounds,
        ORDER.rounds,
    )
    plan = plan_order(ORDER, federation.cards).plan
    planned = plan.spent()[0]
    for i, (policy, told) in enumerate(zip(federation.policies, trained["silos"], strict=True)):
        path = Path(DaemonSettings.load(policy).ledger)
        monkeypatch.setattr("sys.argv", ["silodp", "ledger", "verify", str(path), "--json"])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        assert json.loads(capsys.readouterr().out)["ok"]
        ledger = DurableLedger.open(path)
        charges = [entry for entry in ledger.entries() if entry.act == "charge"]
        assert {entry.run for entry in charges} == {trained["run"]}
        assert len({entry.query_id for entry in charges}) == len(charges) == ORDER.rounds
        buckets: dict[str, np.ndarray] = {}
        for entry in charges:
            buckets[entry.bucket] = buckets.get(entry.bucket, np.asarray(0.0)) + entry.amount
        spent = float(plan.rule.epsilon(buckets, np.asarray(federation.cards[i].delta)))
        assert spent == pytest.approx(planned[i], rel=1e-7)
        assert told["spent_epsilon_at_most"] == pytest.approx(planned[i], rel=1e-7)
        assert 2.99 < spent <= 3.0
        assert told["ledger"]["count"] == ledger.released()[0] - 1, "then the answer was stored"


class Played:
    """A channel to nobody: the replies whose hashes are in a journal, from the silos' ledgers, each
    opened with its silo's key alone.
    """

    def __init__(self, cards, ledgers, rounds) -> None:
        self._cards, self._ledgers, self._rounds = cards, ledgers, iter(rounds)

    def combined(self, query, silos, weights):
        told, total = next(self._rounds), np.zeros((1, query.statistic.w.shape[-1]))
        for i in silos:
            card = self._cards[i]
            (raw,) = [
                r
                for r in self._ledgers[i]
                if hashlib.sha256(r).hexdigest() == told.heard[card.name].sha256
            ]
            reply = decode_reply(raw, limit=2**20, silo_key=card.key)
            assert isinstance(reply, Answer)
            total += reply.value.numpy()
        return torch.from_numpy(total / len(silos)).to(query.statistic.w.dtype), tuple(silos)


class Nobody:
    """A carrier that must not be needed."""

    def exchange(self, frames, timeout):
        raise AssertionError("asked")

    names = exchange


def journal_of(folder: Path) -> Journal:
    header = (folder / "journal").read_bytes()
    begin = 12
    told = json.loads(header[begin : begin + int.from_bytes(header[8:12], "big")])
    return Journal(folder / "journal", told["run"], told["config"])


def test_the_recorded_releases_played_to_the_generator_give_the_same_iterates_bit_for_bit(
    federation, trained, tmp_path
):
    """The journal has the hash of each question, and a question has the iterate in it: `Remote`
    refuses a question of another hash.
    """
    shutil.copytree(federation.folder / "runs/1", tmp_path / "run")
    made = plan_order(ORDER, federation.cards)
    plan, run = made.plan, made.run
    start = federation.problem.initial([ORDER.coins])
    journal = journal_of(tmp_path / "run")
    channel = Remote(
        federation.cards,
        Nobody(),
        run=trained["run"],
        key=read_key(federation.folder / "asker.key"),
        journal=journal,
    )
    first = list(
        run(Federation(channel, Everyone(3)), federation.problem, start, **plan.mechanisms)
    )
    assert journal.read() is None
    journal.close()
    journal = journal_of(tmp_path / "run")
    ledgers = [
        DurableLedger.open(Path(DaemonSettings.load(policy).ledger))
        for policy in federation.policies
    ]
    kept = [
        [
            one.stored(e.query_id)
            for e in one.entries()
            if e.act == "answer" and e.run == trained["run"]
        ]
        for one in ledgers
    ]
    played = Played(federation.cards, kept, iter(journal.read, None))
    second = list(
        run(Federation(played, Everyone(3)), federation.problem, start, **plan.mechanisms)
    )
    journal.close()
    assert len(first) == len(second) == ORDER.rounds
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    model = load_file(federation.folder / "runs/1/model.safetensors")
    assert all(
        torch.equal(value[0], model[name])
        for name, value in federation.problem.split(second[-1]).items()
    )
    assert len(model) == len(federation.problem.split(second[-1]))


def serve(policy: str, state: str) -> None:
    os.environ["SILODP_STATE"], sys.argv = state, ["silent_gate", policy]
    runpy.run_path(str(SILENT_GATE), run_name="__main__")


@contextlib.contextmanager
def silent_gates(federation):
    """Gates that draw no noise, which are in no wheel, at the shipped ones' sockets. They have
    copies of the silos' folders, and a registry of their own: with the silos' own they would refuse
    to serve the copy of a ledger."""
    gates = []
    for card in federation.cards:
        shipped, silent = (
            federation.folder / "silos" / card.name,
            federation.folder / "silent" / card.name,
        )
        (shipped / "gate.sock").rename(shipped / "shipped.sock")
        shutil.copytree(shipped, silent, ignore=shutil.ignore_patterns("*.sock"))
        (shipped / "gate.sock").symlink_to(silent / "gate.sock")
        gates.append(
            forked.Process(
                target=serve,
                args=(str(silent / "policy.toml"), str(federation.folder / "silent/state")),
            )
        )
        gates[-1].start()
    try:
        deadline = time.monotonic() + LIMIT
        while not all(
            (federation.folder / "silent" / card.name / "gate.sock").exists()
            for card in federation.cards
        ):
            assert all(gate.is_alive() for gate in gates)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        for gate in gates:
            gate.terminate()
            gate.join(LIMIT)
        for card in federation.cards:
            shipped = federation.folder / "silos" / card.name
            (shipped / "shipped.sock").rename(shipped / "gate.sock")


def test_without_noise_the_iterates_over_the_engine_are_the_simulations(federation):
    made = plan_order(ORDER, federation.cards)
    plan, run = made.plan, made.run
    start = federation.problem.initial([ORDER.coins])
    with silent_gates(federation):
        carrier, timeouts = (
            carrier_of(federation.folder, federation.state),
            Timeouts(deadline=LIMIT, limit=LIMIT, retry=60.0),
        )
        signing = read_key(federation.folder / "asker.key")
        channel = Remote(
            federation.cards, carrier, run="silent", key=signing, quorum=3, timeouts=timeouts
        )
        got = list(
            run(Federation(channel, Everyone(3)), federation.problem, start, **plan.mechanisms)
        )
    records = Records.of(
        [
            (held.x, held.y)
            for held in (
                read_records(DaemonSettings.load(policy), None) for policy in federation.policies
            )
        ]
    )
    without = {
        kind: replace(mechanism, noise_multiplier=0.0)
        for kind, mechanism in plan.mechanisms.items()
    }
    simulation = simulated_federation(federation.problem, records, Everyone(3))
    wanted = list(run(simulation, federation.problem, start, **without))
    assert len(got) == len(wanted) == ORDER.rounds
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-5
    assert (wanted[-1] - start).abs().max() > 1e-2, "they went somewhere"


def test_a_second_model_is_approved_and_trained_for_the_same_patients_and_the_ledgers_go_on(
    federation, trained
):
    """Last, since afterwards the silos approve another study. One engine is enough: what is new
    happens at the gates.
    """
    if federation.engine != "nvflare":
        pytest.skip("shown over NVFlare")
    ledgers = [Path(DaemonSettings.load(policy).ledger) for policy in federation.policies]
    before = [
        (DurableLedger.open(path).used(), list(DurableLedger.open(path).entries()))
        for path in ledgers
    ]
    made = json.loads(
        shell(
            "federation",
            "propose",
            "second",
            "--folder",
            federation.folder,
            "--model",
            "mlp:3",
            "--json",
        )
    )
    told = json.loads(
        shell("silo", "approve", made["file"], *federation.policies, "--yes", "--json")
    )
    assert {answer["gate"] for answer in told["silos"]} == {"the gate has restarted with it"}
    order = (
        "--algorithm",
        "mb-sgd",
        "--epsilon",
        1,
        "--rounds",
        1,
        "--quorum",
        3,
        "--retry",
        30,
        "--json",
    )
    second = json.loads(shell("federation", "run", "--folder", federation.folder, *order))
    assert second["ended"] == "finished"
    assert second["run"] != trained["run"]
    cards = [read_card(Path(policy).parent / "silo.json") for policy in federation.policies]
    assert cards[0].definition != federation.cards[0].definition
    check_study(federation.folder / "runs/2", cards)
    with pytest.raises(
        BadInput, match="trained first, and silo silo-1 now approves the study second"
    ):
        check_study(federation.folder / "runs/1", cards)
    for path, (used, entries) in zip(ledgers, before, strict=True):
        ledger = DurableLedger.open(path)
        ledger.verify()
        assert ledger.used() > used > 0
        assert list(ledger.entries())[: len(entries)] == entries, (
            "the same chain, with more at its end"
        )
