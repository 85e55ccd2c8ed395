"""What masks cost a gate: its answer to a question for a total, in a box for a shuffler and under
the masks of a cohort, and the bytes of each.

    python -m benchmarks.masks [--silos 25] [--records 1024] [--repeat 5]

LeNet, 62,006 parameters. Counts are made by the one code; what differs is what is done with them
afterwards, and is timed with them, in turns, in seconds of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks.gate import Silo
from benchmarks.gradient import CLIP
from benchmarks.models import cnn, images
from silodp.core.mechanisms import Masked, Shuffled
from silodp.core.protocol.box import Contribution, encrypt_box
from silodp.core.protocol.codec import Envelope
from silodp.core.protocol.masks import ROW, Row, offered, write_table
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.host.keys import public
from silodp.silo.service.masking import Masker, Masking

DEFINITION, MOST = "0" * 64, 1.1


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, usual in (("--silos", 25), ("--records", 1024), ("--repeat", 5)):
        parser.add_argument(name, type=int, default=usual)
    told = parser.parse_args()
    torch.manual_seed(0)
    silo = Silo(cnn(), *(part[0] for part in images(1, told.records)))
    others = [Ed25519PrivateKey.generate() for _ in range(told.silos - 1)]
    members = tuple(f"silo-{i} {public(key)}" for i, key in enumerate(others))
    masker = Masker(Masking(members, 0, 2), Ed25519PrivateKey.generate(), DEFINITION)
    coins = {"levels": 800, "noise_bits": 1000, "contributions": told.silos * told.records}
    shuffler, pseudonym = public(X25519PrivateKey.generate()), Ed25519PrivateKey.generate()

    def asked(mechanism: Shuffled, run: str = "benchmark", cohort: bytes = b"") -> Envelope:
        return Envelope(
            "silo", run, "query", DEFINITION, Query(Grad(silo.w), mechanism), "0", 0, cohort
        )

    def counts(envelope: Envelope) -> np.ndarray:
        return silo.exact.answer(envelope.query, [0])[0, 0].numpy()

    def rows_of_others(run: str) -> list[Row]:
        return [
            offered(
                key, X25519PrivateKey.generate(), definition=DEFINITION, run=run, epoch=bytes(16)
            )
            for key in others
        ]

    def sealed(run: str, rows: list[Row]) -> bytes:
        plain = asked(Shuffled("minibatch", CLIP, **coins), run)
        made = Contribution(
            plain.shuffle_round,
            1,
            told.records,
            coins["levels"] + coins["noise_bits"],
            counts(plain),
        )
        return encrypt_box(made, shuffler, pseudonym)

    def masked(run: str, rows: list[Row]) -> bytes:
        """With the key that the gate makes and signs for this answer alone, and the check of
        everybody's.
        """
        own = masker.offer("server", run)
        table = write_table(
            replace(row, trials=told.records * coins["noise_bits"]) for row in (*rows, own)
        )
        hidden = asked(Masked("minibatch", CLIP, **coins, modulus=32), run, table)
        masker.check(hidden, told.records)
        return masker.masked("server", hidden, counts(hidden))

    times: dict[str, list[float]] = {"box for a shuffler": [], "masked": []}
    for turn in range(told.repeat + 1):
        rows = rows_of_others(run := f"benchmark-{turn}")
        for (name, spent), make in zip(times.items(), (sealed, masked), strict=True):
            begin = time.process_time()
            answer = make(run, rows)
            if turn:  # the first warms up
                spent.append(time.process_time() - begin)
            elif name == "masked":
                print(
                    f"A masked answer has {len(answer) / silo.w.numel():g} bytes a "
                    f"parameter; its question, {ROW * told.silos} of table."
                )
    middle = {name: statistics.median(spent) for name, spent in times.items()}
    for name, seconds in middle.items():
        print(f"{name:<20} {seconds:8.3f} s")
    ratio = middle["masked"] / middle["box for a shuffler"]
    print(
        f"masked over shuffled {ratio:8.3f}   (at most {MOST}: "
        f"{'kept' if ratio <= MOST else 'NOT KEPT'})"
    )


if __name__ == "__main__":
    main()
