"""What a round about a large model costs over NVFlare besides the silos' own work, and the memory
of a real gate that answers about it.

    OMP_NUM_THREADS=1 python -m benchmarks.large [--parameters 10000000] [--silos 3] [--rounds 3]
    [--engine nvflare] [--no-gate]

The engine, its couriers, TLS, codec, signatures and journal are real. The gates before which it
stands are stand-ins that check the question and sign a packed answer of random numbers; the time of
the slowest of them is taken off a round. On a machine that others use, too, look at the processor
seconds: of the server's own process, and of the engine's. The real gate is one by itself, with 100
records.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.federation import carrier, gate_cost
from benchmarks.plumbing import Silos
from silodp.core.mechanisms import Gaussian
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.asking import Timeouts
from silodp.server.federation import Everyone, Federation
from silodp.server.journal import Journal
from silodp.server.remote import Remote


def stand_in(path: str, number: int, count: int, dim: int) -> None:
    """Answers at the socket, and prints the seconds that each answer took."""
    silos, value = Silos(count, dim), torch.randn(1, dim, dtype=torch.float64)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        print("ready", flush=True)
        while True:
            line, _ = listener.accept()
            with line, line.makefile("rb") as reader, contextlib.suppress(OSError):
                frame = reader.read(int.from_bytes(reader.read(4), "big"))
                if not frame:
                    continue
                start = time.perf_counter()
                reply = silos.reply(f"silo-{number}", frame, value)
                print(time.perf_counter() - start, flush=True)
                line.sendall(len(reply).to_bytes(4, "big") + reply)


def engine(folder: Path) -> tuple[float, float]:
    """Seconds of the processor that processes with a word about this folder have used, but for the
    stand-ins, and the most memory of one of them in GiB.
    """
    ticks, most = 0, 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes()
            if str(folder).encode() in words and b"--stand-in" not in words:
                ticks += sum(
                    map(int, (place / "stat").read_text().rpartition(")")[2].split()[11:13])
                )
                most = max(
                    most, int((place / "status").read_text().partition("VmHWM:")[2].split()[0])
                )
    return ticks / os.sysconf("SC_CLK_TCK"), most / 2**20


def rounds_over(name: str, count: int, dim: int, rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sdp")))
        sockets = {f"silo-{i}": folder / f"{i}.sock" for i in range(count)}
        started = []
        for i, path in enumerate(sockets.values()):
            words = [
                sys.executable,
                "-m",
                "benchmarks.large",
                "--stand-in",
                str(path),
                str(i),
                str(count),
                str(dim),
            ]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
            started.append(process)
            stack.callback(process.communicate)
            stack.callback(process.kill)
        outs = [process.stdout for process in started if process.stdout]
        for out in outs:
            out.readline()
        line = stack.enter_context(carrier(name, folder, sockets))
        journal = Journal(folder / "journal", "run", "large")
        stack.callback(journal.close)
        journal.read()
        waits = Timeouts.estimated(parameters=dim, records=1000)
        remote = Remote(
            Silos(count, dim).cards,
            line,
            run="run",
            key=Ed25519PrivateKey.generate(),
            journal=journal,
            timeouts=waits,
            quorum=count,
        )
        fed, w = Federation(remote, Everyone(count)), torch.randn(1, dim)
        for number in range(1, rounds + 1):
            before, (spent, _), begin, used = (
                journal.path.stat().st_size,
                engine(folder),
                time.perf_counter(),
                time.process_time(),
            )
            w = w - 0.1 * fed.mean(Query(Grad(w), Gaussian("minibatch", 1.0, 1.0)))
            beside = (folder / "replies").stat().st_size
            journal.iterate(number, "0" * 64)
            wall, used = time.perf_counter() - begin, time.process_time() - used
            now, most = engine(folder)
            busy = max(float(out.readline()) for out in outs)
            print(
                (
                    f"{name}, {count} silos, {dim:,} parameters, round {number}: "
                    f"{wall - busy:.2f} s of plumbing ({wall:.2f} s, of which the slowest silo "
                    f"{busy:.2f} s; "
                    f"CPU: server {used:.2f} s, engine {now - spent:.2f} s, whose largest "
                    f"process has had {most:.2f} GiB), "
                    f"{(journal.path.stat().st_size - before) / 1e6:.1f} MB of journal, "
                    f"{beside / 1e6:.1f} MB of replies until the iterate"
                ),
                flush=True,
            )


def main() -> None:
    if sys.argv[1:2] == ["--stand-in"]:
        path, *numbers = sys.argv[2:]
        return stand_in(path, *map(int, numbers))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=10**7)
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="nvflare", help="nvflare, flower or direct")
    parser.add_argument("--no-gate", action="store_true", help="leave the real gate out")
    given = parser.parse_args()
    rounds_over(given.engine, given.silos, given.parameters, given.rounds)
    if not given.no_gate:
        seconds, memory = gate_cost(given.parameters // 53, 1)
        print(
            (
                f"a gate: {seconds:.1f} s an answer about {given.parameters // 53 * 53 + 2:,} "
                f"parameters, memory at most {memory:.2f} GiB"
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
