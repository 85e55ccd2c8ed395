"""Gates, questions and bytes for the tests of a hostile server and a hostile courier."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gates import ASKER, PATIENCE, Gate, Gates, three_gates, write_csv
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import (
    Answer,
    Envelope,
    Refusal,
    decode_reply,
    encode_query,
)
from silodp.core.query import Query
from silodp.core.sampling import FullBatch
from silodp.core.statistics import Grad
from silodp.server.remote import Card
from silodp.silo.service.provision import provision
from silodp.wire.socket import Socket

PUBLIC = ASKER.public_key().public_bytes_raw()
SECOND, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (8, 9))
COURIER, OTHER = 65534, 65533  # users that own nothing here
ROOT = os.getuid() == 0
needs_users = pytest.mark.skipif(not ROOT, reason="needs to become another user")
LIMITS = {
    "statistics": ("Grad", "GradDiff", "LocalSteps"),
    "samplings": ("FullBatch", "DisjointBatches"),
    "clip": (1e-6, 10.0),
    "minimum_noise_multiplier": 5.0,
    "maximum_local_steps": 5,
}


def asked(
    card: Card,
    query_id: str,
    statistic=None,
    *,
    clip=1.0,
    noise=30.0,
    run="run",
    model=None,
    key=ASKER,
    sampling=None,
    of="",
) -> bytes:
    statistic = Grad(torch.zeros(1, card.parameters)) if statistic is None else statistic
    query = Query(statistic, Gaussian("anchor", clip, noise, sampling or FullBatch()))
    return encode_query(
        Envelope(of or card.name, run, query_id, model or card.definition, query), key
    )


def opened(card: Card, raw: bytes) -> Answer | Refusal:
    return decode_reply(raw, limit=2**20, silo_key=card.key)


def code(gate: Gate, frame: bytes) -> str:
    return getattr(
        opened(gate.card, Socket(gate.place.socket).ask(frame, PATIENCE)), "code", "answered"
    )


@contextlib.contextmanager
def hostile_gates() -> Iterator[Gates]:
    """Three silos with budget to spare, their folder open to every user as far as the sockets' own
    modes let them.
    """
    users = {"socket_group": str(COURIER), "couriers": ("0", str(COURIER))} if ROOT else {}
    with three_gates(**LIMITS | users, connections=8, queries_per_run=10**6) as made:
        made[0].folder.chmod(0o711)
        warm = {card.name: asked(card, "warm") for card in made.cards}
        assert len(made.direct().exchange(warm, PATIENCE)) == 3
        yield made


def gate_of(folder: Path, records, **changes) -> Gate:
    """One more silo, with other records or under another policy; its daemon is not started yet."""
    folder.mkdir(parents=True)
    askers = [key.public_key().public_bytes_raw().hex() for key in (ASKER, SECOND)]
    settings = {
        "label": "label",
        "name": "silo",
        "epsilon": 1.0,
        "model": "mlp:4",
        "askers": askers,
        "registry": folder / "state/ledgers",
    }
    silo = provision(
        folder / "silo",
        data=write_csv(folder / "data.csv", *records),
        **settings | LIMITS | changes,
    )
    return Gate(folder, silo.policy, ["-m", "silodp.cli", "silo", "serve"])


@contextlib.contextmanager
def running(*gates: Gate) -> Iterator[None]:
    for gate in gates:
        gate.launch()
    try:
        for gate in gates:
            gate.wait()
        yield
    finally:
        for gate in gates:
            gate.end()


def point(card: Card, value: float = 0.0, extra: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.full((1, card.parameters + extra), value, dtype=dtype)


def unsigned(frame: bytes) -> bytes:
    return frame[:5] + bytes(96) + frame[101:]


def claiming(frame: bytes, key: bytes) -> bytes:
    return frame[:5] + key + frame[37:]
