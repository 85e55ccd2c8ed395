"""What one round costs a server besides the silos' own work: CPU seconds and bytes of journal, with the real codec and real signatures.

    python -m benchmarks.plumbing [SILOS:PARAMETERS ...]        1000:10000 and 3:10000000 where nothing is given

The silos are in this process: they check the question and sign a packed answer of random numbers, and none of that is counted. Counted is all
else that a round takes: questions encoded and signed, replies verified and unpacked, the journal on the disk, the mean.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.card import Card
from silodp.core.protocol.codec import Answer, decode_query, encode_reply
from silodp.core.protocol.packing import Packing
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.federation import Everyone, Federation
from silodp.server.journal import Journal
from silodp.server.remote import Remote

RECORDS, ROUNDS = 1000, 3
PACKING = Packing.of(2.0**-20, float(RECORDS), 2.0**21 * (RECORDS + 12), 2.0**21)


class Silos:
    """A carrier to silos that answer anything with their own random numbers; `spent` is what they have used of the processor."""

    def __init__(self, count: int, dim: int) -> None:
        self._keys = {f"silo-{i}": Ed25519PrivateKey.from_private_bytes((i + 1).to_bytes(32)) for i in range(count)}
        self._value, self._dim, self.spent = torch.randn(1, dim, dtype=torch.float64), dim, 0.0

    @property
    def cards(self) -> list[Card]:
        def card(name: str, key: Ed25519PrivateKey) -> Card:
            public = key.public_key().public_bytes_raw().hex()
            return Card(name, public, RECORDS, 3.0, 1e-6, "gdp", "x", "zero", (), (), self._dim, "0" * 64)

        return [card(*item) for item in self._keys.items()]

    def exchange(self, frames: Mapping[str, bytes], timeout: float) -> dict[str, bytes]:
        start = time.process_time()
        replies = {name: self._reply(name, frame) for name, frame in frames.items()}
        self.spent += time.process_time() - start
        return replies

    def _reply(self, name: str, frame: bytes) -> bytes:
        envelope, _, digest = decode_query(frame, limit=2**30)
        answer = Answer(name, envelope.query_id, digest, self._value, envelope.query.event(), 1, "0" * 64, PACKING)
        return encode_reply(answer, self._keys[name])

    def names(self) -> list[str]:
        return list(self._keys)


def measure(count: int, dim: int) -> None:
    silos = Silos(count, dim)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal", "run", "plumbing")
        journal.read()
        remote = Remote(silos.cards, silos, run="run", key=Ed25519PrivateKey.generate(), journal=journal)
        fed, w = Federation(remote, Everyone(count)), torch.randn(1, dim)
        before = journal.path.stat().st_size
        start, begin, silos.spent = time.process_time(), time.perf_counter(), 0.0
        for _ in range(ROUNDS):
            mean: Tensor = fed.mean(Query(Grad(w), Gaussian("minibatch", 1.0, 1.0)))
            w = w - 0.1 * mean.to(w)
        used, wall = time.process_time() - start - silos.spent, time.perf_counter() - begin
        kept = (journal.path.stat().st_size - before) / ROUNDS
        journal.close()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{count:,} silos, {dim:,} parameters: {used / ROUNDS:.2f} s of server CPU a round ({wall / ROUNDS:.2f} s with the silos'), "
        f"{kept / 1e6:.1f} MB of journal, memory at most {most:.2f} GiB (the silos' too)",
        flush=True,
    )


def main() -> None:
    for word in sys.argv[1:] or ("1000:10000", "3:10000000"):
        measure(*map(int, word.split(":")))


if __name__ == "__main__":
    main()
