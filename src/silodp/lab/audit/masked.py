"""Masked totals under attack: other members of a cohort, whose keys the audit has, and what a gate's answer is without its masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from silodp.core.mechanisms import Masked
from silodp.core.protocol.codec import Envelope
from silodp.core.protocol.masks import Row, add_masked, masked, offered, read_table, write_table
from silodp.lab.audit.pipeline import public, sealing, signing

RUN = "audit"


class Companion:
    """Another silo of a masked total. What it adds is zero, so that its answer takes its masks off another's."""

    def __init__(self, name: str, definition: str, run: str = RUN) -> None:
        self.identity, self._key = signing(name), sealing(name)
        self.member = f"{name} {public(self.identity)}"
        self.row = offered(self.identity, self._key, definition=definition, run=run, epoch=bytes(16))

    def answer(self, envelope: Envelope, dimension: int) -> bytes:
        rows = read_table(envelope.cohort)
        (mine,) = (row for row in rows if row.key == self.row.key)
        asked = envelope.query.mechanism
        return masked(np.zeros(dimension, np.int64), self._key, mine, rows, envelope.shuffle_round, asked.modulus)


def with_cohort(envelope: Envelope, own: Row, records: int, others: Sequence[tuple[Companion, int]], attempt: int = 0) -> Envelope:
    """The question to a silo with so many records in the batch, and to these others with theirs."""
    asked = envelope.query.mechanism
    assert isinstance(asked, Masked)
    members = [(own, records), *((other.row, n) for other, n in others)]
    table = write_table(replace(row, trials=n * asked.noise_bits) for row, n in members)
    return replace(envelope, cohort=table, attempt=attempt)


def unmasked(answer: bytes, envelope: Envelope, others: Sequence[Companion]) -> np.ndarray:
    """(d,): the counts in a silo's answer, which the server and all others can read together."""
    modulus = envelope.query.mechanism.modulus
    dimension = len(answer) * 8 // modulus
    return add_masked([answer, *(other.answer(envelope, dimension) for other in others)], modulus)
