"""One silo with a real gate, and run folders that real commands have written, for all tests of the
pages.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from looking import PATIENCE, TOKEN, run_command, served, started, until

from gates import Unhurried, wbcd, write_csv
from research import compare
from research.study import Grid, Study
from silodp.cli.federation_files import problem_of
from silodp.server.order import Order
from silodp.server.remote import Card, Timeouts
from silodp.server.run import NetworkRun
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
            folder / "clinic",
            data=write_csv(folder / "clinic.csv", x, y),
            label="label",
            name="clinic",
            epsilon=9.0,
            model="mlp:4",
            askers=[asker],
            registry=folder / "state/ledgers",
            statistics=("Grad", "GradDiff", "LocalSteps"),
            queries_per_hour=10_000,
        )
        self.policy, self.card = Path(made.policy), folder / "clinic/silo.json"
        self.environment = {"SILODP_STATE": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        state = {
            "version": 1,
            "engine": "direct",
            "silos": {"clinic": str(self.policy)},
            "registry": "",
            "processes": {},
        }
        (folder / "federation.json").write_text(json.dumps(state))
        self.start()

    def start(self) -> None:
        self.process = started(
            "silo", "serve", self.policy, log=self.folder / "gate.txt", **self.environment
        )
        until(lambda: "clinic" in self.direct().names(), "the gate did not start")

    def direct(self) -> Direct:
        return Direct({"clinic": self.folder / "clinic/gate.sock"})

    def conduct(self, out: Path, **order) -> NetworkRun:
        card = Card.of(json.loads(self.card.read_text()))
        deadline = order.pop("deadline", PATIENCE)
        timeouts = Timeouts(deadline=deadline, limit=deadline, retry=min(5.0, deadline))
        settings = {"algorithm": "spider", "rounds": 4, "phase": 2, "epsilon": ("0.5",)} | order
        return NetworkRun(
            [card],
            problem_of(card, Order(**settings)),
            Order(**settings),
            Unhurried(self.direct()),
            out,
            key=self.key,
            timeouts=timeouts,
        )


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
    made = Study(
        "wbcd",
        3,
        Grid((0.5,), (1.0,), (1,)),
        trials=2,
        epsilons=(1.0, 6.0),
        methods=("mb-sgd", "mb-sgd-paper", "mb-sgd-open"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)  # in this process
        compare.carry_out({folder: made})
    return folder


# --- a browser, and what it looks at -------------------------------------------------------------

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SCHEMA = """
[columns.age]
type = "number"
range = [20, 100]
[columns.pressure]
type = "number"
range = [80, 200]
[columns.smoker]
type = "boolean"
[label]
column = "ill"
task = "binary"
classes = ["no", "yes"]
"""


@pytest.fixture(scope="session")
def browser():
    """Debian's chromium, by Playwright for Python."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (silodp[dev])"
    )
    if not (chromium := shutil.which("chromium")):
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with sync_api.sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="session")
def root(tmp_path_factory, gated, study):
    """Runs of each kind, made by the real commands."""
    folder = tmp_path_factory.mktemp("seen") / "runs"
    folder.mkdir()
    shutil.copy(
        gated.folder / "federation.json", folder.parent
    )  # as beside the runs of `silodp federation run`
    shutil.copytree(study, folder / "compare-wbcd")
    run_command(
        "train --data wbcd --algorithm spider --epsilon 3 --rounds 20 --seed 1 --json --out",
        folder / "train",
    )
    list(gated.conduct(folder / "clinic", rounds=10, phase=5, epsilon=("1.5",)))
    return folder


@pytest.fixture(scope="session")
def more(root, tmp_path_factory):
    """Folders that show what the three above do not: curves and an evaluation, a run that was
    stopped, and a page of its own about survival.
    """
    folder = tmp_path_factory.mktemp("more")
    random, files = np.random.default_rng(3), []
    (folder / "schema.toml").write_text(SCHEMA)
    for silo in ("north", "south"):
        age, pressure, smoker = (
            random.uniform(20, 100, 1500),
            random.uniform(80, 200, 1500),
            random.integers(0, 2, 1500),
        )
        ill = random.random(1500) < 1 / (1 + np.exp((70 - age) / 8))
        rows = zip(age, pressure, smoker, ill, strict=True)
        (folder / f"{silo}.csv").write_text(
            "age,pressure,smoker,ill\n"
            + "".join(
                f"{a:.1f},{p:.1f},{'yes' if s else 'no'},{'yes' if i else 'no'}\n"
                for a, p, s, i in rows
            )
        )
        files += ["--silo", folder / f"{silo}.csv"]
    words = (
        "train --algorithm mb-sgd --model additive:6 --rounds 8 --epsilon 3 --held-out 0.4 "
        "--seed 1 --json --schema"
    )
    run_command(
        words,
        folder / "schema.toml",
        *files,
        "--out",
        folder / "runs/a study with a rather long name, second try",
    )
    run_command("evaluate --epsilon 2 --seed 1 --json", next((folder / "runs").iterdir()))
    shutil.copytree(root / "train", folder / "runs/stopped")
    (folder / "runs/stopped/summary.json").unlink()
    for run in root.iterdir():
        shutil.copytree(run, folder / "runs" / run.name)
    return folder / "runs"


@pytest.fixture(scope="session")
def base(root, gated):
    with (
        pytest.MonkeyPatch.context() as patch,
        served(Path(root.name), gated.policy, TOKEN) as port,
    ):
        patch.chdir(root.parent)
        yield f"http://127.0.0.1:{port}"
