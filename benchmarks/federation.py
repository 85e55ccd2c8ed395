"""What a network costs: seconds and bytes of a round over each engine, beside the same round in
simulation.

    OMP_NUM_THREADS=1 python -m benchmarks.federation [--engines direct,nvflare,flower] [--silos
    3,10] [--rounds 9] [--csv FILE] [--heavy]

A round is one question about the gradient to every silo. What it costs is taken apart:
- plumbing: frames of the real length to every silo and replies of the real length back, over the
  engine with its TLS, to stand-ins that reply at once. `direct` has no engine: it is the Unix
  sockets alone.
- server: signing a question for each silo, and checking and reading each reply.
- gate: one real gate daemon answers one new question by itself: per-record gradients in float64,
  exact noise, a ledger on disk.
- simulation: the same round with all silos in one process, float noise and a ledger in memory.
  Where each silo has a machine of its own, a round takes plumbing + server + gate. Times are
  medians; the bytes on the wire are what the loopback carried, in the quietest of the rounds. Every
  process is on this machine, and Flower starts two for each silo: more than three silos of it only
  with --heavy.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import Answer, Envelope, decode_reply, encode_query, encode_reply
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.algorithms.mb_sgd import mb_sgd
from silodp.server.plan import calibrate
from silodp.silo.data.records import Records
from silodp.silo.service.provision import provision
from silodp.simulation.connect import simulate
from silodp.wire.hub import Direct, Hub
from silodp.wire.socket import Socket

FEATURES, RECORDS, PATIENCE = 50, 100, 120.0
WIDTHS = {3_394: 64, 1_000_006: 18_868}
"""Hidden units of a network 50-H-2 by its number of parameters."""
KEY = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
STAND_IN = """
import socket, sys, threading
replies = {int(size): bytes(int(reply)) for size, reply in (pair.split(":") for pair in sys.argv[2:])}
def serve(line):
    with line:
        file = line.makefile("rb")
        size = int.from_bytes(file.read(4), "big")
        file.read(size)
        reply = replies[size]
        line.sendall(len(reply).to_bytes(4, "big") + reply)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(16)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""  # noqa: E501


@dataclass(frozen=True)
class Row:
    engine: str
    silos: int
    parameters: int
    plumbing_s: float
    plumbing_worst_s: float
    server_s: float
    gate_s: float
    simulation_s: float
    frames_mb: float
    """Megabytes of the frames of a round, out and back."""
    wire_mb: float
    """What the loopback carried for them."""

    def __str__(self) -> str:
        times = (
            self.plumbing_s,
            self.plumbing_worst_s,
            self.server_s,
            self.gate_s,
            self.simulation_s,
        )
        return (
            f"{self.engine:9}{self.silos:6}{self.parameters:12,}"
            + "".join(f"{t:11.3f}" for t in times)
            + f"{self.frames_mb:10.2f}{self.wire_mb:9.2f}"
        )


HEAD = f"{'engine':9}{'silos':>6}{'parameters':>12}{'plumbing':>11}{'worst':>11}{'server':>11}{'gate':>11}{'simulation':>11}{'frames MB':>10}{'wire MB':>9}"  # noqa: E501


# --- one round's frames --------------------------------------------------------------------------


@dataclass(frozen=True)
class Frames:
    """A question about a gradient and its answer, as bytes."""

    query: bytes
    reply: bytes

    @classmethod
    def of(cls, dim: int) -> Frames:
        query = encode_query(_envelope(dim, "q"), KEY)
        answer = Answer(
            "silo-0",
            "q",
            "0" * 64,
            torch.zeros(1, dim, dtype=torch.float64),
            _query(dim).event(),
            1,
            "0" * 64,
        )
        return cls(query, encode_reply(answer, KEY))


def _query(dim: int) -> Query:
    return Query(Grad(torch.zeros(1, dim)), Gaussian("anchor", 1.0, 100.0))


def _envelope(dim: int, query_id: str, model: str = "0" * 64) -> Envelope:
    return Envelope("silo-0", "run", query_id, model, _query(dim))


def server_seconds(dim: int, silos: int, rounds: int) -> float:
    frames, key, times = Frames.of(dim), KEY.public_key().public_bytes_raw().hex(), []
    for _ in range(rounds):
        start = time.perf_counter()
        for i in range(silos):
            encode_query(_envelope(dim, f"q-{i}"), KEY)
            decode_reply(frames.reply, limit=2**28, silo_key=key)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- the engines, in front of stand-ins ----------------------------------------------------------


@contextlib.contextmanager
def stand_ins(folder: Path, silos: int) -> Iterator[dict[str, Path]]:
    sizes = [f"{len(frames.query)}:{len(frames.reply)}" for frames in map(Frames.of, WIDTHS)]
    sockets = {f"silo-{i}": folder / f"{i}.sock" for i in range(silos)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", STAND_IN, str(path), *sizes], stdout=subprocess.PIPE, text=True
        )
        for path in sockets.values()
    ]
    try:
        for process in started:
            assert process.stdout
            process.stdout.readline()
        yield sockets
    finally:
        for process in started:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def carrier(engine: str, folder: Path, sockets: dict[str, Path]) -> Iterator[Direct | Hub]:
    if engine == "direct":
        yield Direct(sockets)
        return
    if engine == "nvflare":
        from silodp.wire.nvflare import site
    else:
        from silodp.wire.flower import site
    site.provision(folder / "f", list(sockets))
    try:
        site.start(folder / "f", sockets, patience=PATIENCE)
        yield Hub(folder / "f" / "hub.sock")
    finally:
        site.stop(folder / "f")


def plumbing(engine: str, silos: int, rounds: int) -> dict[int, tuple[list[float], float]]:
    """By number of parameters: seconds of each round after the first, and megabytes that the
    loopback carried in the quietest.
    """
    found = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sdp")))
        sockets = stack.enter_context(stand_ins(folder, silos))
        line = stack.enter_context(carrier(engine, folder, sockets))
        for dim in WIDTHS:
            frames = Frames.of(dim)
            asked, times, carried = dict.fromkeys(sockets, frames.query), [], []
            for _ in range(rounds + 1):
                before, start = _loopback(), time.perf_counter()
                replies = line.exchange(asked, PATIENCE)
                times.append(time.perf_counter() - start)
                carried.append(_loopback() - before)
                if {len(reply) for reply in replies.values()} != {len(frames.reply)} or len(
                    replies
                ) != silos:
                    raise SystemExit(
                        f"{engine}: {len(replies)} of {silos} silos replied, so nothing is reported"
                    )
            found[dim] = times[1:], min(carried[1:]) / 1e6
    return found


def _loopback() -> int:
    """Bytes sent over the loopback so far; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/dev").read_text().splitlines():
            if line.strip().startswith("lo:"):
                return int(line.split(":")[1].split()[8])
    return 0


# --- what is computed ----------------------------------------------------------------------------


def gate_cost(width: int, rounds: int) -> tuple[float, float]:
    """One real gate daemon on 100 records, whose network has so many hidden units: seconds from a
    new question to the answer, and its memory in GiB.
    """
    dim = (FEATURES + 3) * width + 2
    rng, asker = np.random.default_rng(0), KEY.public_key().public_bytes_raw().hex()
    with tempfile.TemporaryDirectory(prefix="sdp") as name:
        folder = Path(name)
        table = np.column_stack(
            [rng.normal(size=(RECORDS, FEATURES)).round(6), np.arange(RECORDS) % 2]
        )
        header = ",".join([*(f"f{j}" for j in range(FEATURES)), "label"])
        np.savetxt(
            folder / "data.csv",
            table,
            fmt=["%.6f"] * FEATURES + ["%d"],
            delimiter=",",
            header=header,
            comments="",
        )
        (folder / "data.csv").chmod(0o600)
        silo = provision(
            folder / "silo",
            data=folder / "data.csv",
            label="label",
            name="silo-0",
            epsilon=60.0,
            model=f"mlp:{width}",
            askers=[asker],
            registry=folder / "state/ledgers",
        )
        environment = os.environ | {"SILODP_STATE": str(folder / "state")}
        command = [sys.executable, "-m", "silodp.cli", "silo", "serve", silo.policy]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            process.stdout.readline()
            times, gate = [], Socket(folder / "silo" / "gate.sock")
            for i in range(rounds + 1):
                frame = encode_query(_envelope(dim, f"q-{i}", silo.definition), KEY)
                start = time.perf_counter()
                reply = gate.ask(frame, PATIENCE)
                times.append(time.perf_counter() - start)
                if not isinstance(
                    decoded := decode_reply(reply, limit=2**28, silo_key=silo.key), Answer
                ):
                    raise SystemExit(
                        f"the gate refuses with {decoded.code}, so nothing is reported"
                    )
            most = [
                text.split()[1]
                for text in Path(f"/proc/{process.pid}/status").read_text().splitlines()
                if text.startswith("VmHWM")
            ]
            return statistics.median(times[1:]), int(most[0]) / 2**20
        finally:
            process.terminate()
            process.communicate()


def simulation_seconds(dim: int, silos: int, rounds: int) -> float:
    torch.manual_seed(0)
    model, loss = model_by_name(f"mlp:{WIDTHS[dim]}", FEATURES, 2)
    problem, kept = (
        Problem(model, loss),
        Records.of(
            [(torch.randn(RECORDS, FEATURES), torch.arange(RECORDS) % 2) for _ in range(silos)]
        ),
    )
    algorithm = functools.partial(mb_sgd, rounds=rounds + 1, step=0.5)
    plan = calibrate(
        algorithm, {"minibatch": Gaussian("minibatch", 1.0, 0.0)}, Budget(60.0, 1e-4), kept.counts
    )
    fed, _ = simulate(problem, kept, plan, [0])
    times = [time.perf_counter()]
    for _ in algorithm(fed, problem, problem.initial([0]), **plan.mechanisms):
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(times[1:]))


# --- the table -----------------------------------------------------------------------------------


def rows(engines: list[str], silos: list[int], rounds: int, heavy: bool) -> Iterator[Row]:
    gate = {dim: gate_cost(width, min(rounds, 5))[0] for dim, width in WIDTHS.items()}
    for count in silos:
        own = {
            dim: (server_seconds(dim, count, rounds), simulation_seconds(dim, count, rounds))
            for dim in WIDTHS
        }
        for engine in engines:
            if engine == "flower" and count > 3 and not heavy:
                print(
                    (
                        f"flower with {count} silos is left out: {2 * count} processes for "
                        "couriers; --heavy measures it"
                    ),
                    flush=True,
                )
                continue
            for dim, (times, carried) in plumbing(engine, count, rounds).items():
                frames = Frames.of(dim)
                sent = count * (len(frames.query) + len(frames.reply)) / 1e6
                yield Row(
                    engine,
                    count,
                    dim,
                    statistics.median(times),
                    max(times),
                    own[dim][0],
                    gate[dim],
                    own[dim][1],
                    sent,
                    carried,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engines",
        type=lambda text: text.split(","),
        default=["direct", "nvflare", "flower"],
        help="which, with commas between them",
    )
    parser.add_argument(
        "--silos",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[3, 10],
        help="how many, likewise",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds of which the median is taken")
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument(
        "--heavy", action="store_true", help="Flower with more than three silos too"
    )
    given = parser.parse_args()
    if unknown := [name for name in given.engines if name not in ("direct", "nvflare", "flower")]:
        parser.error(f"--engines has {unknown[0]!r}; use direct, nvflare, flower")
    load = os.getloadavg()[0]
    about = (
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before it began, "
        f"{torch.get_num_threads()} torch threads, {RECORDS} records a silo"
    )
    print(about, HEAD, sep="\n", flush=True)
    found = []
    for row in rows(given.engines, given.silos, given.rounds, given.heavy):
        print(row, flush=True)
        found.append(row)
    if given.csv:
        with given.csv.open("w", newline="") as file:
            file.write(f"# {about}\n")
            table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
            table.writeheader()
            table.writerows(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()}
                for row in found
            )


if __name__ == "__main__":
    main()
