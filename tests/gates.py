"""Real gate daemons for tests of what talks to them: WBCD cut into three silos, each a process of
its own.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.cli import app as cli
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import by_name
from silodp.server.remote import Card
from silodp.silo.data.datasets import DATASETS
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.policy import DaemonSettings
from silodp.silo.service.provision import provision
from silodp.wire.hub import Direct

ASKER = Ed25519PrivateKey.from_private_bytes(bytes([7]) * 32)
PATIENCE = LIMIT = 600.0  # to end a test that hangs; nothing waits so long when all is well
EVERYTHING = ("Grad", "GradDiff", "LocalSteps", "SteeredSteps")


def wbcd(silos: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """The training records in so many parts, at random."""
    split = DATASETS["wbcd"].load(0, None)
    x, y = split.train.x[split.train.mask].numpy(), split.train.y[split.train.mask].numpy()
    order = np.random.default_rng(0).permutation(len(y))
    return [(x[part], y[part]) for part in np.array_split(order, silos)]


def write_csv(path: Path, x: np.ndarray, y: np.ndarray) -> Path:
    header = ",".join([*(f"f{j}" for j in range(x.shape[1])), "label"])
    path.write_text(
        "\n".join(
            [
                header,
                *(
                    ",".join([*map(repr, row.tolist()), str(k)])
                    for row, k in zip(x, y, strict=True)
                ),
            ]
        )
    )
    path.chmod(0o600)
    return path


class Clock:
    """Seconds that pass only where the server pauses, so that a busy machine uses up nobody's
    patience: in the place of its `time`.
    """

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        for module in ("asking", "remote", "remote_shuffled"):
            monkeypatch.setattr(f"silodp.server.{module}.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(min(seconds, 0.01))


class Unhurried:
    """A carrier that waits for whoever is there, however long the server would: only those who are
    gone are silent.
    """

    def __init__(self, carrier) -> None:
        self._carrier, self.names = carrier, carrier.names

    def exchange(self, frames, timeout):
        return self._carrier.exchange(frames, LIMIT)


class Whole(Direct):
    """Brings all replies at once, by an `exchange` that tests replace by one of their own."""

    stream = None

    def exchange(self, frames, timeout):
        return dict(Direct.stream(self, frames, timeout))


class Gate:
    """One daemon, started, killed and looked at as its silo's operator would."""

    def __init__(self, folder: Path, policy: str, program: list[str]) -> None:
        self.folder, self.policy, self.place, self._program = (
            folder,
            policy,
            DaemonSettings.load(policy),
            program,
        )
        self.card = Card.of(json.loads((Path(policy).parent / "silo.json").read_text()))

    def launch(self) -> None:
        environment = os.environ | {
            "SILODP_STATE": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, *self._program, self.policy],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> None:
        assert self.process.stdout
        assert "answers at" in self.process.stdout.readline()

    def end(self, kind: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(kind)
        code = self.process.wait(PATIENCE)
        assert self.process.stdout
        self.process.stdout.close()
        return code

    def ledger(self) -> DurableLedger:
        return DurableLedger.open(Path(self.place.ledger))

    def charges(self, run: str) -> list[str]:
        """Ids of the run's questions, one for each time that they were charged."""
        return [
            entry.query_id
            for entry in self.ledger().entries()
            if entry.act == "charge" and entry.run == run
        ]


class Gates:
    def __init__(self, gates: list[Gate]) -> None:
        self.gates = gates
        self.cards = [gate.card for gate in gates]
        self.sockets = {gate.card.name: gate.place.socket for gate in gates}
        card = self.cards[0]
        self.problem = Problem(
            *model_by_name(card.model, len(card.features), len(card.classes)), by_name(card.prox)
        )

    def direct(self) -> Direct:
        return Direct(self.sockets)

    def __getitem__(self, index: int) -> Gate:
        return self.gates[index]


@contextlib.contextmanager
def three_gates(*, silent: bool = False, epsilon: float = 60.0, **changes) -> Iterator[Gates]:
    """Three daemons on WBCD, in a folder of their own; `silent` ones draw no noise."""
    with tempfile.TemporaryDirectory(prefix="silodp-") as name:
        folder, made = Path(name), []
        program = (
            [str(Path(__file__).parent / "silent_gate.py")]
            if silent
            else ["-m", "silodp.cli", "silo", "serve"]
        )
        for i, (x, y) in enumerate(wbcd()):
            data = write_csv(folder / f"{i}.csv", x, y)
            settings = {
                "label": "label",
                "epsilon": epsilon,
                "model": "mlp:4",
                "statistics": EVERYTHING,
                "queries_per_hour": 100_000,
            }
            settings["askers"] = [ASKER.public_key().public_bytes_raw().hex()]
            silo = provision(
                folder / f"silo{i}",
                data=data,
                name=f"silo-{i}",
                registry=folder / "state/ledgers",
                **settings | changes,
            )
            made.append(Gate(folder, silo.policy, program))
        for gate in made:
            gate.launch()
        try:
            for gate in made:
                gate.wait()
            yield Gates(made)
        finally:
            for gate in made:
                gate.end()


def shell(*words: object) -> str:
    """What `silodp WORDS` prints, in a process of its own that must end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "silodp.cli", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(words: list[str], environment: dict[str, str], log: str) -> None:
    """`silodp WORDS` in a process that need not import everything anew."""
    os.environ.update(environment)
    sys.argv = ["silodp", *words]
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    cli.main()
