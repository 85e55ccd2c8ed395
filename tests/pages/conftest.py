"""One silo with a real gate, and run folders that real commands have written, for all tests of the pages."""

import json
import tempfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from looking import PATIENCE, started, until

from gates import Unhurried, wbcd, write_csv
from silodp.cli.federation_files import problem_of
from silodp.lab.studies import compare
from silodp.lab.studies.study import Grid, Study
from silodp.server.order import Order
from silodp.server.remote import Card, Timeouts
from silodp.server.run import Conduct
from silodp.silo.service.provision import provision
from silodp.wire.hub import Direct


class Gated:
    """A silo, its gate in a process of its own, and the server that asks it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, Ed25519PrivateKey.generate()
        (self.folder / "asker.key").write_text(self.key.private_bytes_raw().hex())
        (self.folder / "asker.key").chmod(0o600)
        x, y = wbcd(3)[0]
        asker = self.key.public_key().public_bytes_raw().hex()
        made = provision(
            folder / "clinic", data=write_csv(folder / "clinic.csv", x, y), label="label", name="clinic", epsilon=9.0, model="mlp:4",
            askers=[asker], registry=folder / "state/ledgers", statistics=("Grad", "GradDiff", "LocalSteps"), queries_per_hour=10_000,
        )  # fmt: skip
        self.policy, self.card = Path(made.policy), folder / "clinic/silo.json"
        self.environment = {"SILODP_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        state = {"version": 1, "engine": "direct", "silos": {"clinic": str(self.policy)}, "registry": "", "processes": {}}
        (folder / "federation.json").write_text(json.dumps(state))
        self.start()

    def start(self) -> None:
        self.process = started("silo", "serve", self.policy, log=self.folder / "gate.txt", **self.environment)
        until(lambda: "clinic" in self.direct().names(), "the gate did not start")

    def direct(self) -> Direct:
        return Direct({"clinic": self.folder / "clinic/gate.sock"})

    def conduct(self, out: Path, **order) -> Conduct:
        card = Card.of(json.loads(self.card.read_text()))
        deadline = order.pop("deadline", PATIENCE)
        timeouts = Timeouts(deadline=deadline, limit=deadline, retry=min(5.0, deadline))
        settings = {"algorithm": "spider", "rounds": 4, "phase": 2, "epsilon": ("0.5",)} | order
        return Conduct([card], problem_of(card), Order(**settings), Unhurried(self.direct()), out, key=self.key, timeouts=timeouts)


@pytest.fixture(scope="session")
def gated():
    with tempfile.TemporaryDirectory(prefix="silodp-") as name:
        silo = Gated(Path(name))
        yield silo
        silo.process.terminate()
        silo.process.join(PATIENCE)


@pytest.fixture(scope="session")
def study(tmp_path_factory) -> Path:
    """A real comparison, small enough to be made here."""
    folder = tmp_path_factory.mktemp("compared") / "study"
    made = Study("wbcd", 3, Grid((0.5,), (1.0,), (1,)), trials=2, epsilons=(1.0, 6.0), methods=("mb-sgd", "mb-sgd-paper", "mb-sgd-open"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)  # in this process
        compare.carry_out({folder: made})
    return folder
