"""What is spent stays spent, whatever happens to the process, the disk or the clock.

SILODP_LONG=500 makes the random kill -9 loop as long as that, and prints where the kills fell.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from ledgers import CHEAP, PRICE, ask, asked, make, refuses, settled, table, tampering, watch_steps

from silodp.core.errors import Refused
from silodp.core.events import Event
from silodp.core.sampling import FullBatch
from silodp.silo.ledger import file as ledgerfile
from silodp.silo.ledger.durable import DurableLedger

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["pytest", "hypothesis", "silodp.silo.ledger.durable", "silodp.silo.ledger.memory"]
)


# --- clock, disk ---------------------------------------------------------------------------------


def test_a_clock_that_goes_back_changes_nothing(folder, monkeypatch):
    ledger = make(folder)
    ask(ledger, "q1")
    monkeypatch.setattr(ledgerfile, "now", lambda: "1970-01-01T00:00:00.000+00:00")
    ask(ledger, "q2")
    monkeypatch.undo()
    ask(ledger, "q3")
    assert [e.sequence for e in ledger.entries()] == [1, 2, 3, 4, 5, 6]
    times = [e.time for e in ledger.entries()]
    assert times[2] < times[0]
    ledger.verify()
    assert ask(DurableLedger.open(ledger.path), "q2", b"other") == b"an answer"


def run(target, *args) -> int:
    """The exit code of `target` in a process of its own: 0 if it returned, -9 if it was killed."""
    process = processes.Process(target=target, args=args)
    process.start()
    process.join(600)
    assert process.exitcode is not None
    return process.exitcode


def read_only(path: Path) -> None:
    if os.getuid() == 0:
        os.setuid(65534)  # root writes everywhere
    ledger, read = DurableLedger.open(path), []
    ledger.verify()
    assert ledger.head()[0] == 3
    assert ask(ledger, "answered", b"other") == b"an answer"
    with refuses("ledger"):
        settled(asked(ledger, "new"), CHEAP, lambda: read.append(1) or b"")
    assert read == []
    with refuses("ledger"):
        ask(ledger, "charged")
    assert ledger.head()[0] == 3


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_ledger_that_cannot_be_written_is_shown_but_answers_nothing_new(folder, what):
    ledger = make(folder)
    ask(ledger, "answered")
    asked(ledger, "charged").charge(CHEAP, [0])
    for file in folder.iterdir():
        file.chmod(0o444 if what == "file" else 0o666)
    folder.chmod(0o555 if what == "folder" else 0o777)
    assert run(read_only, ledger.path) == 0
    folder.chmod(0o755)


def on_a_full_disk(path: Path) -> None:
    ledger = DurableLedger.open(path)
    one = asked(ledger)
    one.charge(CHEAP, [0])
    before = ledger.head()
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, resource.RLIM_INFINITY))
    for _ in range(2):
        with refuses("ledger"):
            one.store(bytes(100_000))
    assert one.answer is None
    assert ledger.head() == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert one.store(b"answer") == b"answer"


def test_when_a_file_may_not_grow_nothing_is_answered_and_nothing_breaks(folder):
    ledger = make(folder)
    assert run(on_a_full_disk, ledger.path) == 0
    ledger.verify()
    assert [e.act for e in ledger.entries()] == ["charge", "answer"]


def test_on_a_full_disk_nothing_is_answered_and_nothing_breaks(folder):
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip(
            "only root can mount a small disk; the test before this one limits the file instead"
        )
    try:
        ledger = make(disk)
        ask(ledger, "q0")
        answered = 1
        with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        for k in range(1, 4):
            with refuses("ledger"):
                ask(ledger, f"q{k}", bytes(3000))
        (disk / "filler").unlink()
        for k in range(1, 4):
            ask(ledger, f"q{k}", bytes(3000))
            answered += 1
        ledger.verify()
        assert (
            [e.act for e in ledger.entries()].count("charge")
            == answered
            == [e.act for e in ledger.entries()].count("answer")
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_when_the_anchor_cannot_be_written_nothing_is_answered_and_a_retry_is_not_charged_twice(
    folder, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    ledger, computed = make(folder), []
    with monkeypatch.context() as disk:
        disk.setattr(ledgerfile, "write_anchor", full)
        with refuses("ledger"):
            settled(asked(ledger), CHEAP, lambda: computed.append(1) or b"")
    assert computed == []
    charged = asked(ledger)
    charged.charge(CHEAP, [0])
    with monkeypatch.context() as disk:
        disk.setattr(ledgerfile, "write_anchor", full)
        with refuses("ledger"):
            charged.store(b"first")
        assert charged.answer is None
        with refuses("ledger"):
            asked(ledger)  # stored, but not safe from a rollback: it may not be sent yet
    assert ask(ledger, answer=b"second") == b"first"
    assert [e.act for e in ledger.entries()] == ["charge", "answer"]
    assert json.loads(ledger.anchor.read_text())["count"] == 2


# --- several at once -----------------------------------------------------------------------------


def contend(path: Path, name: str, event: Event, results) -> None:
    ledger, answered = DurableLedger.open(path), 0
    for k in range(20):
        with contextlib.suppress(Refused):
            ask(ledger, f"{name}-{k}", event=event)
            answered += 1
    results.put(answered)


def test_many_processes_at_once_never_pass_the_budget(folder):
    ledger = make(folder)
    event = Event(FullBatch(), float((ledger.capacity / 24.5) ** -0.5))
    results = processes.Queue()
    crowd = [
        processes.Process(target=contend, args=(ledger.path, f"p{k}", event, results))
        for k in range(6)
    ]
    for process in crowd:
        process.start()
    assert sum(results.get(timeout=600) for _ in crowd) == 24
    for process in crowd:
        process.join(600)
    ledger.verify()
    assert ledger.used() == pytest.approx(24 / 24.5)
    assert json.loads(ledger.anchor.read_text())["count"] == 48


def same_id(path: Path, start, results) -> None:
    ledger = DurableLedger.open(path)
    for k in range(6):
        one = asked(ledger, f"q{k}")
        start.wait(600)
        one.charge(CHEAP, [0])
        start.wait(
            600
        )  # each has been charged, none has stored: each computes an answer of its own
        one.store(os.urandom(8))
        results.put((k, one.answer))


def test_two_processes_that_answer_the_same_id_send_the_same_bytes(folder):
    ledger, results, start = make(folder), processes.Queue(), processes.Barrier(3)
    crowd = [
        processes.Process(target=same_id, args=(ledger.path, start, results)) for _ in range(3)
    ]
    for process in crowd:
        process.start()
    sent = Counter(results.get(timeout=600) for _ in range(18))
    for process in crowd:
        process.join(600)
    assert sorted((k, n) for (k, _), n in sent.items()) == [(k, 3) for k in range(6)]
    assert sorted(e.act for e in ledger.entries()) == ["answer"] * 6 + ["charge"] * 6


def test_threads_may_share_a_ledger(folder):
    ledger, answers = make(folder), []
    event = Event(FullBatch(), float((ledger.capacity / 10.5) ** -0.5))

    def work(name):
        for k in range(6):
            with contextlib.suppress(Refused):
                answers.append(ask(ledger, f"{name}-{k}", event=event))

    crowd = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert len(answers) == 10
    ledger.verify()


# --- kill -9 -------------------------------------------------------------------------------------


class Log:
    """What a gate did, written where kill -9 cannot take it back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, *words: str) -> None:
        with self.path.open("a") as file:
            file.write(" ".join(words) + "\n")

    def lines(self, act: str) -> list[list[str]]:
        text = self.path.read_text() if self.path.exists() else ""
        return [line.split()[1:] for line in text.splitlines() if line.startswith(act)]


def gate(ledger: DurableLedger, query_id: str, log: Log) -> bytes:
    """Answers as a gate does, with fresh noise each time that it computes."""

    def compute() -> bytes:
        log.add("read", query_id)
        return os.urandom(8)

    answer = settled(asked(ledger, query_id), CHEAP, compute)
    log.add("sent", query_id, answer.hex())
    return answer


def gate_that_dies(path: Path, query_id: str, log: Log, step: int) -> None:
    ledger, steps = DurableLedger.open(path), itertools.count()

    def before(_):
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_steps(setattr, before)
    gate(ledger, query_id, log)
    before("end")


def check_after_death(path: Path, log: Log) -> DurableLedger:
    """Opens the ledger as a restarted gate would, and compares it with what was done: nothing read
    uncharged, nothing sent that differs.
    """
    ledger = DurableLedger.open(path)
    charged = {e.query_id for e in ledger.entries() if e.act == "charge"}
    assert {query_id for (query_id,) in log.lines("read")} <= charged
    sent = dict(log.lines("sent"))
    assert len({tuple(line) for line in log.lines("sent")}) == len(
        sent
    )  # every id was sent with one answer only
    assert ledger.used() * ledger.capacity == pytest.approx(len(charged) * PRICE)
    assert ledger.used() * ledger.capacity >= len(sent) * PRICE * (1 - 1e-9)
    return ledger


def test_killed_before_any_step_a_gate_never_undercounts_and_loses_no_answer(folder):
    ledger, log = make(folder), Log(folder / "log")
    fates = []
    for step in itertools.count():
        query_id = f"q{step}"
        code = run(gate_that_dies, ledger.path, query_id, log, step)
        again = check_after_death(ledger.path, log)
        sent = dict(log.lines("sent")).get(query_id)
        acts = tuple(e.act for e in again.entries() if e.query_id == query_id)
        fates.append((acts, sent is not None))
        answer = gate(again, query_id, log)
        assert sent is None or answer == bytes.fromhex(sent)
        again.verify()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert [fate for fate, _ in itertools.groupby(fates)] == [
        ((), False),
        (("charge",), False),
        (("charge", "answer"), False),
        (("charge", "answer"), True),
    ]
    assert len(fates) > 20


def gate_for_ever(path: Path, log: Log) -> None:
    ledger = DurableLedger.open(path)
    for k in itertools.count(len(dict(log.lines("sent")))):
        gate(ledger, f"q{k}", log)


def where_it_died(path: Path, log: Log) -> str:
    journal = Path(f"{path}-journal")
    if journal.exists() and journal.stat().st_size:
        return "in a transaction (its journal is left)"
    with tampering(path) as connection:
        rows = connection.execute(
            "SELECT sequence, act, query_id FROM entries ORDER BY sequence DESC LIMIT 1"
        ).fetchall() or [(0, "", "")]
    if json.loads(Path(f"{path}.anchor").read_text())["count"] < rows[0][0]:
        return f"between the commit of the {rows[0][1]} and its anchor"
    if rows[0][1] == "charge":
        return "between charge and store"
    return (
        "between store and send"
        if rows[0][2] and rows[0][2] not in dict(log.lines("sent"))
        else "between queries, or before the first write"
    )


def test_kill_9_at_random_instants_never_undercounts_and_loses_no_answer(tmp_path):
    ledger, log = make(tmp_path, data=table(seed=9)), Log(tmp_path / "log")
    generator, fates = random.Random(3), Counter()
    times = int(os.environ.get("SILODP_LONG", "40"))
    for _ in range(times):
        done = len(log.lines("sent"))
        process = processes.Process(target=gate_for_ever, args=(ledger.path, log))
        process.start()
        deadline = time.monotonic() + 600
        while len(log.lines("sent")) == done and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(generator.uniform(0, 0.06))
        process.kill()
        process.join(600)
        assert process.exitcode == -signal.SIGKILL
        fates[where_it_died(ledger.path, log)] += 1
        check_after_death(ledger.path, log)
    again = check_after_death(ledger.path, log)
    again.verify()
    sent = dict(log.lines("sent"))
    assert len(sent) >= times
    for query_id, answer in sent.items():
        assert asked(again, query_id).answer == bytes.fromhex(answer)
    charged = sum(e.act == "charge" for e in again.entries())
    assert len(sent) <= charged <= len(sent) + 1  # at most the query at hand
    print(f"\n{times} kills: {charged} charged, {len(sent)} sent; {dict(fates)}")
