"""What one round costs a server besides the silos' own work: CPU seconds, peak memory and bytes of
journal, with the real codec, signatures and sockets.

    python -m benchmarks.plumbing [SILOS:PARAMETERS[:ROUNDS[:hub]] ...]        1000:10000:3,
    3:10000000:3 and 50:10000000:1 where nothing is given

With "hub" there is one between server and silos, in a process of its own, as an engine has it. The
silos are one other process, at a socket each: they check the question and sign a packed answer of
random numbers, and none of that is counted. All answers are there before the first may be taken,
which is the worst that can happen to a server's memory; they share their numbers, so that the silos
hold them once. Counted is all else that a round takes: questions encoded and signed, replies
verified and unpacked, the journal on the disk, the mean.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core.events import Event
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Answer, decode_query, encode_reply
from silodp.core.protocol.packing import Packing
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.asking import Timeouts
from silodp.server.federation import Everyone, Federation
from silodp.server.journal import Journal
from silodp.server.remote import Remote
from silodp.wire.hub import Direct, Hub, _listens, serve_hub

RECORDS = 1000
PACKING = Packing.of(2.0**-20, float(RECORDS), 2.0**21 * (RECORDS + 12), 2.0**21)
WAITS = Timeouts(600.0, 600.0, 600.0)


class Silos:
    """Silos that answer anything with their own random numbers."""

    def __init__(self, count: int, dim: int) -> None:
        self._keys = {
            f"silo-{i}": Ed25519PrivateKey.from_private_bytes((i + 1).to_bytes(32))
            for i in range(count)
        }
        self._dim = dim

    @property
    def cards(self) -> list[Card]:
        def card(name: str, key: Ed25519PrivateKey) -> Card:
            public = key.public_key().public_bytes_raw().hex()
            return Card(
                name, public, RECORDS, 3.0, 1e-6, "gdp", "x", "zero", (), (), self._dim, "0" * 64
            )

        return [card(*item) for item in self._keys.items()]

    def reply(self, name: str, frame: bytes, value: Tensor) -> bytes:
        envelope, _, digest = decode_query(frame, limit=2**30)
        event = envelope.query.event()
        assert isinstance(event, Event)
        answer = Answer(name, envelope.query_id, digest, value, event, 1, "0" * 64, PACKING)
        return encode_reply(answer, self._keys[name])

    def serve(self, listeners: Mapping[str, socket.socket]) -> None:
        """A round for each time that all have been asked: first all questions are read, then all
        answers are offered at once.
        """
        value = torch.randn(1, self._dim, dtype=torch.float64)
        names = {listener.fileno(): name for name, listener in listeners.items()}
        while True:
            answers: list[tuple[socket.socket, list[memoryview]]] = []
            numbers = b""
            with selectors.DefaultSelector() as waiting:
                for listener in listeners.values():
                    waiting.register(listener, selectors.EVENT_READ)
                while len(answers) < len(names):
                    for key, _ in waiting.select():
                        line, _ = listeners[names[key.fd]].accept()
                        with line.makefile("rb") as reader:
                            raw = self.reply(
                                names[key.fd],
                                reader.read(int.from_bytes(reader.read(4), "big")),
                                value,
                            )
                        numbers = numbers or raw[-PACKING.width * self._dim :] if PACKING else b""
                        assert raw.endswith(numbers)
                        head = len(raw).to_bytes(4, "big") + raw[: len(raw) - len(numbers)]
                        answers.append((line, [memoryview(head), memoryview(numbers)]))
            with selectors.DefaultSelector() as offered:
                for line, left in answers:
                    line.setblocking(False)
                    offered.register(line, selectors.EVENT_WRITE, left)
                while offered.get_map():
                    for key, _ in offered.select():
                        line, left = key.fileobj, key.data
                        assert isinstance(line, socket.socket)
                        sent = line.sendmsg(left)
                        while left and sent >= len(left[0]):
                            sent -= len(left.pop(0))
                        if left:
                            left[0] = left[0][sent:]
                        else:
                            offered.unregister(line)
                            line.close()


@contextlib.contextmanager
def served(silos: Silos, names: list[str], folder: Path):
    listeners = {name: socket.socket(socket.AF_UNIX) for name in names}
    for name, listener in listeners.items():
        listener.bind(str(folder / name))
        listener.listen(4)
    process = multiprocessing.get_context("fork").Process(
        target=silos.serve, args=(listeners,), daemon=True
    )
    process.start()
    for listener in listeners.values():
        listener.close()
    try:
        yield {name: folder / name for name in names}
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def carried(
    sockets: Mapping[str, Path], hub: Path | None
) -> Iterator[tuple[Direct | Hub, Callable[[], str]]]:
    """The carrier, and what is to be said of a hub's memory."""
    direct = Direct(sockets)
    if hub is None:
        yield direct, str
        return
    process = multiprocessing.get_context("fork").Process(
        target=serve_hub, args=(hub, direct.stream, direct.names, threading.Event()), daemon=True
    )
    process.start()
    while not _listens(str(hub)):
        time.sleep(0.05)

    def most() -> str:
        return (
            ", the hub's "
            f"{int(Path(f'/proc/{process.pid}/status').read_text().split('VmHWM:')[1].split()[0]) / 2**20:.2f} "  # noqa: E501
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            "GiB"
        )

    try:
        yield Hub(hub), most
    finally:
        process.kill()
        process.join()


def measure(count: int, dim: int, rounds: int = 3, hub: bool = False) -> None:
    silos = Silos(count, dim)
    cards = silos.cards
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="sdp"))
        sockets = stack.enter_context(served(silos, [card.name for card in cards], Path(name)))
        carrier, beyond = stack.enter_context(
            carried(sockets, Path(name) / "hub.sock" if hub else None)
        )
        journal = Journal(Path(name) / "journal", "run", "plumbing")
        journal.read()
        remote = Remote(
            cards,
            carrier,
            run="run",
            key=Ed25519PrivateKey.generate(),
            journal=journal,
            timeouts=WAITS,
            quorum=count,
        )
        fed, w = Federation(remote, Everyone(count)), torch.randn(1, dim)
        before, beside = journal.path.stat().st_size, 0
        start, begin = time.process_time(), time.perf_counter()
        for number in range(1, rounds + 1):
            mean: Tensor = fed.mean(Query(Grad(w), Gaussian("minibatch", 1.0, 1.0)))
            w = w - 0.1 * mean.to(w)
            beside = (Path(name) / "replies").stat().st_size
            journal.iterate(number, "0" * 64)
        used, wall = time.process_time() - start, time.perf_counter() - begin
        kept = (journal.path.stat().st_size - before) / rounds
        journal.close()
        passed_on = beyond()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        (
            f"{count:,} silos, {dim:,} parameters: {used / rounds:.2f} s of server CPU a round "
            f"({wall / rounds:.2f} s with the silos'), "
            f"memory of the server at most {most:.2f} GiB{passed_on}, {kept / 1e6:.1f} MB of "
            f"journal, {beside / 1e6:.1f} MB of replies until the iterate"
        ),
        flush=True,
    )


def main() -> None:
    context = multiprocessing.get_context(
        "spawn"
    )  # the highest memory is of a process's whole life
    for word in sys.argv[1:] or ("1000:10000:3", "3:10000000:3", "50:10000000:1"):
        *numbers, hub = word.split(":") if word.endswith(":hub") else [*word.split(":"), ""]
        process = context.Process(
            target=measure, args=tuple(map(int, numbers)), kwargs={"hub": bool(hub)}
        )
        process.start()
        process.join()


if __name__ == "__main__":
    main()
