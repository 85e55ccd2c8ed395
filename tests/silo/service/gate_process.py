"""Gate daemons for tests: a silo that is made, frames for it, and its process."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import Answer, Envelope, Refusal, decode_reply, encode_query
from silodp.core.query import Query
from silodp.core.statistics import Grad, LocalSteps
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.policy import DaemonSettings
from silodp.silo.service.provision import Silo, provision
from silodp.wire.socket import Socket

SERVER, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 3))
ASKER = SERVER.public_key().public_bytes_raw().hex()
CANARY = 987654.125
PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well


def write_data(path: Path, *, seed: int = 0) -> Path:
    x = np.random.default_rng(seed).normal(size=(60, 3))
    x[17, 1] = CANARY
    path.write_text(
        "\n".join(
            [
                "a,b,c,outcome",
                *(f"{a!r},{b!r},{c!r},{k % 2}" for k, (a, b, c) in enumerate(x.tolist())),
            ]
        )
    )
    path.chmod(0o600)
    return path


def made(folder: Path, **changes) -> Silo:
    settings = {
        "data": write_data(folder / "clinic.csv"),
        "label": "outcome",
        "name": "clinic",
        "epsilon": 3.0,
        "model": "mlp:4",
    }
    settings |= {"askers": [ASKER], "registry": folder / "state/ledgers"}
    return provision(folder / "silo", **settings | changes)


def asked(silo: Silo, query_id: str, statistic=None, *, noise=30.0, key=SERVER) -> bytes:
    statistic = Grad(torch.zeros(1, silo.parameters)) if statistic is None else statistic
    return encode_query(
        Envelope(
            silo.name,
            "run-1",
            query_id,
            silo.definition,
            Query(statistic, Gaussian("anchor", 1.0, noise)),
        ),
        key,
    )


def slow(silo: Silo, query_id: str, steps: int) -> bytes:
    """A query that takes a good while, at a small price."""
    return asked(
        silo, query_id, LocalSteps(torch.zeros(1, silo.parameters), steps, 1e-3), noise=2000.0
    )


class Process:
    """`silodp silo serve`, and a courier's way to it."""

    def __init__(self, silo: Silo, folder: Path) -> None:
        self.silo, self.folder, self.place = silo, folder, DaemonSettings.load(silo.policy)
        self.socket, self.errors = Socket(self.place.socket), folder / "stderr"
        self.start()

    def start(self) -> None:
        environment = os.environ | {
            "SILODP_STATE": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "silodp.cli", "silo", "serve", self.silo.policy]
        self.errors.touch(0o600)
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self.process.stdout
        assert self.process.stdout.readline().startswith("clinic answers at "), (
            self.errors.read_text()
        )

    def end(self, kind: signal.Signals) -> int:
        self.process.send_signal(kind)
        code = self.process.wait(PATIENCE)
        assert self.process.stdout
        self.process.stdout.close()
        return code

    def reply(self, frame: bytes) -> Answer | Refusal:
        return decode_reply(self.socket.ask(frame, PATIENCE), limit=2**20, silo_key=self.silo.key)

    def code(self, frame: bytes) -> str:
        return getattr(self.reply(frame), "code", "answered")

    def ledger(self) -> DurableLedger:
        return DurableLedger.open(Path(self.place.ledger))

    def acts(self, query_id: str) -> list[str]:
        return [entry.act for entry in self.ledger().entries() if entry.query_id == query_id]

    @contextmanager
    def line(self):
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE)
            line.connect(self.place.socket)
            yield line


def whole(line: socket.socket) -> bytes:
    """One reply, or what came of it before the other side hung up."""
    received = b""
    while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "big"):
        piece = line.recv(2**16)
        if not piece:
            break
        received += piece
    return received[4:]


def edited(silo: Silo, **changes: str) -> str:
    text = Path(silo.policy).read_text()
    for name, value in changes.items():
        text, times = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert times == 1
    path = Path(silo.policy).with_name("edited.toml")
    path.write_text(text)
    path.chmod(0o600)
    return str(path)
