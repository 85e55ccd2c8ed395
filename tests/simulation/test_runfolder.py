"""A run folder is about one run: nothing is written over, kinds are not mixed, and what was
interrupted is known for it and goes on.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from silodp.core.errors import BadInput
from silodp.host import extension
from silodp.runs import RunFolder
from silodp.server.algorithms import find
from silodp.server.order import Order
from silodp.simulation import pinned, training
from silodp.simulation.source import Source
from silodp.simulation.training import read_back, train

TOLD = (
    "train",
    "--data",
    "wbcd",
    "--model",
    "logistic",
    "--algorithm",
    "mb-sgd",
    "--rounds",
    2,
    "--held-out",
    0.2,
)
LONG = (
    "train",
    "--data",
    "wbcd",
    "--model",
    "logistic",
    "--algorithm",
    "mb-sgd",
    "--rounds",
    800,
    "--held-out",
    0.2,
)
LIMIT = 170.0


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))


@pytest.fixture
def used(silodp, tmp_path):
    """A folder that has been trained into, evaluated, reported on, and given a file by its
    owner.
    """
    assert silodp(*TOLD, "--epsilon", 3, "--out", "run")[0] == 0
    assert silodp("evaluate", "run", "--epsilon", 2)[0] == 0
    assert silodp("report", "run")[0] == 0
    (tmp_path / "run/notes.txt").write_text("mine")
    return tmp_path / "run"


def names(folder):
    return {path.name for path in folder.iterdir()}


def contents(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(result, *words):
    code, _, err = result
    assert (code, err.count("\n"), "Traceback" in err) == (2, 1, False), err
    for word in words:
        assert word in err, err


def lines(folder):
    """What was asked and answered, without the time at which."""
    found = map(json.loads, (folder / "progress.jsonl").read_text().splitlines(keepends=False))
    return [{k: v for k, v in line.items() if k != "time"} for line in found]


def stopped_by(kind, folder, *words, after=3):
    """A real process, stopped by a real signal once so many questions were answered: (exit code,
    stderr).
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "silodp.cli", *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # what a shell starts in the background ignores it
    )
    deadline, progress = time.monotonic() + LIMIT, folder / "progress.jsonl"
    while not (progress.exists() and progress.read_bytes().count(b"\n") >= after):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(kind)
    _, err = process.communicate(timeout=LIMIT)
    return process.returncode, err


# --- nothing is written over ---------------------------------------------------------------------


def test_a_folder_with_a_run_is_refused_and_stays_as_it_is(silodp, used):
    before = contents(used)
    refused(
        silodp(*TOLD, "--epsilon", 0.5, "--out", "run"),
        "run contains a run already (finished)",
        "choose another --out",
    )
    refused(silodp(*TOLD, "--out", "run", "--new"), "contains a run already")
    refused(silodp("train", "--resume", "--out", "run"), "contains a finished run")
    assert contents(used) == before
    assert "seed" not in names(used), "known noise protects nobody"


def test_without_out_each_run_gets_a_folder_of_its_own_and_says_which(silodp, tmp_path):
    assert silodp(*TOLD)[0] == 0
    before = contents(tmp_path / "runs/train")
    code, out, _ = silodp(*TOLD)
    assert (
        code,
        "This run goes to runs/train-2" in out,
        "Model: runs/train-2/model.safetensors" in out,
    ) == (0, True, True)
    assert json.loads(silodp(*TOLD, "--json")[1])["model"] == "runs/train-3/model.safetensors"
    assert contents(tmp_path / "runs/train") == before
    assert names(tmp_path / "runs") == {"train", "train-2", "train-3"}


def test_an_audit_and_a_page_of_ones_own_are_not_written_over(silodp, tmp_path):
    words = ("audit", "--algorithm", "momentum", "--epsilon", 6, "--runs", 100, "--json")
    assert [json.loads(silodp(*words)[1])["folder"] for _ in range(2)] == [
        "runs/audit",
        "runs/audit-2",
    ]
    refused(silodp(*words, "--out", "runs/audit"), "contains audit.json already")
    assert silodp(*TOLD, "--out", "run")[0] == 0
    (tmp_path / "thesis.html").write_text("<html>mine</html>")
    refused(silodp("report", "run", "--out", "thesis.html"), "not a report of silodp")
    assert (tmp_path / "thesis.html").read_text() == "<html>mine</html>"
    for _ in range(2):
        assert silodp("report", "run", "--out", "page.html")[0] == 0


def test_runs_of_different_kinds_do_not_share_a_folder(silodp, tmp_path):
    assert silodp(*TOLD, "--out", "run")[0] == 0
    before = names(tmp_path / "run")
    refused(silodp("tune", "--data", "wbcd", "--out", "run"), "contains a run")
    assert names(tmp_path / "run") == before
    for name in ("config.json", "journal"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(json.dumps({}))
        refused(silodp(*TOLD, "--out", name), "choose another --out")
        assert names(tmp_path / name) == {name}


# --- what is refused leaves nothing --------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        *(
            (*TOLD, *more)
            for more in (
                ("--output", "best"),
                ("--model", "nothing"),
                ("--epsilon", -1),
                ("--seed", -1),
                ("--prox", "x"),
                ("--rounds", 0),
                ("--rule", "x"),
            )
        ),
        ("train", "--data", "none"),
        ("train", "--silo", "missing.csv"),
        ("tune", "--data", "mnist"),
        ("tune", "--data", "wbcd", "--model", "x"),
    ],
    ids=lambda words: " ".join(map(str, (words[0], *words[-2:]))),
)
def test_what_is_refused_leaves_no_folder(silodp, tmp_path, words):
    refused(silodp(*words))
    assert not (tmp_path / "runs").exists()


def test_a_run_that_diverges_is_kept_but_not_resumed(silodp, tmp_path):
    code, _, err = silodp(*TOLD, "--epsilon", 0.1, "--step", 1e300)
    assert code == 2
    assert "diverged" in err or "refused" in err
    assert names(tmp_path / "runs/train") == {"progress.jsonl", "records.json", "run.json"}
    refused(silodp("evaluate", "runs/train"))
    refused(silodp("train", "--resume"), "no interrupted run")
    refused(silodp("train", "--resume", "--out", "runs/train"), "ended by itself")
    assert silodp(*TOLD)[0] == 0, "it is not in the way of another"


# --- interrupted and killed ----------------------------------------------------------------------


def test_an_interrupted_run_says_how_to_go_on_and_the_resumed_one_is_the_run_that_it_would_have_been(  # noqa: E501
    silodp, tmp_path
):
    assert silodp(*LONG, "--seed", 5, "--out", "whole")[0] == 0
    code, err = stopped_by(signal.SIGINT, tmp_path / "runs/train", *LONG, "--seed", 5)
    assert (code, err.count("\n")) == (130, 1), err
    assert "the run is in runs/train" in err
    assert "`silodp train --resume --out runs/train`" in err
    before = contents(tmp_path / "runs")
    for words in (
        (*LONG, "--seed", 5),
        (*LONG, "--out", "runs/train"),
        (*LONG, "--out", "runs/train", "--new"),
    ):
        refused(
            silodp(*words),
            "runs/train contains an interrupted run",
            "--resume --out runs/train",
            "--new" if "--out" not in words else "--out",
        )
    refused(silodp("evaluate", "runs/train"), "that is finished")
    refused(silodp("train", "--resume", "--epsilon", 1), "another epsilon")
    refused(silodp("train", "--resume", "--new"), "give one of them")
    assert contents(tmp_path / "runs") == before
    assert silodp("train", "--resume", "--rounds", 800)[0] == 0
    for name in ("model.safetensors", "transcript.safetensors"):
        found, wanted = (
            load_file(tmp_path / "runs/train" / name),
            load_file(tmp_path / "whole" / name),
        )
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert names(tmp_path / "runs/train") == names(tmp_path / "whole")
    assert silodp("evaluate", "runs/train")[0] == 0
    assert silodp(*TOLD)[0] == 0, "once it is finished it is in nobody's way"


def test_a_killed_run_without_a_seed_of_ones_own_says_the_same_again_and_new_starts_another(
    silodp, tmp_path
):
    killed = tmp_path / "runs/train"
    assert stopped_by(signal.SIGKILL, killed, *LONG)[0] == -signal.SIGKILL
    said = lines(killed)
    assert (killed / "seed").stat().st_mode & 0o777 == 0o600
    refused(silodp(*LONG), "runs/train contains an interrupted run")
    code, out, _ = silodp(*TOLD, "--new")
    assert (code, "goes to runs/train-2" in out) == (0, True)
    assert lines(killed) == said
    assert silodp("train", "--resume", "--json")[0] == 0
    assert lines(killed)[: len(said)] == said, "the noise is that of the run that was killed"
    assert len(lines(killed)) == 800
    assert not (killed / "seed").exists()


def test_a_killed_run_is_not_resumed_on_other_records_or_another_model(silodp, tmp_path):
    """Under the noise of the run before, both would show where the two differ."""
    data, model = tmp_path / "a.csv", tmp_path / "net.py"
    data.write_text("x,label\n" + "".join(f"{k % 7},{k % 2}\n" for k in range(80)))
    net = (
        "from torch import nn\ndef net(features, outputs):\n    return "
        "nn.Sequential(nn.Linear(features, {}), nn.ReLU(), nn.Linear({}, outputs))\n"
    )
    model.write_text(net.format(3, 3))
    words = (
        "train",
        "--silo",
        data,
        "--model",
        f"{model}:net",
        "--algorithm",
        "mb-sgd",
        "--rounds",
        800,
        "--scale",
        "none",
    )
    assert stopped_by(signal.SIGKILL, tmp_path / "runs/train", *words)[0] == -signal.SIGKILL
    text = data.read_text()
    data.write_text(text.replace("0,0\n", "0,1\n", 1))
    refused(silodp("train", "--resume"), "the records are not those")
    data.write_text(text)
    model.write_text(net.format(4, 4))
    refused(silodp("train", "--resume"), "another definition, model_sha256")
    model.write_text(net.format(3, 3))
    assert silodp("train", "--resume")[0] == 0


def test_what_is_killed_before_its_first_question_is_in_nobodys_way(silodp, tmp_path):
    folder = tmp_path / "runs/train"
    folder.mkdir(parents=True)
    for name in ("seed", "records.json", "progress.jsonl"):
        (folder / name).write_text("{}")
    assert silodp(*TOLD)[0] == 0
    assert json.loads((folder / "run.json").read_text())["source"]["data"] == "wbcd"
    assert Path(json.loads(silodp(*TOLD, "--json")[1])["model"]).parent.name == "train-2"


# --- the kept noise is used for the same function alone, and once --------------------------------

NET = """import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.layer = nn.Linear(features, outputs)
    def forward(self, x):
        return self.layer({})
def net(features, outputs):
    return Net(features, outputs)
"""

WRAPS = """import functools
from silodp.server.algorithms.mb_sgd import mb_sgd
@functools.wraps(mb_sgd)
def own(*given, **named):
    for w in mb_sgd(*given, **named):
        yield w * {}
"""


class Killed(BaseException):
    """Ends a run as a kill would, between two questions."""


class Run(NamedTuple):
    """An order, where its records lie, and the folder that it runs in."""

    order: Order
    source: Source
    folder: Path

    def start(self, *, resume=False):
        train(*self, resume=resume)


@pytest.fixture
def order(tmp_path, monkeypatch):
    """Makes orders for a small run in the folder "run"."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(
            "x,z,label\n" + "".join(f"{k % 7},{k % 5},{k % 2}\n" for k in range(60))
        )
    source = Source(silos=(tmp_path / "a.csv", tmp_path / "b.csv"), classes="0,1", scale="none")

    def make(**words):
        small = {"algorithm": "mb-sgd", "model": "logistic", "rounds": 4, "phase": 2, "inner": 2}
        return Run(Order(**small | words), source, tmp_path / "run")

    return make


def cut(run):
    """The run, gone after its second question."""
    seen = training._Simulation._record_answer

    def once(watch, *answer):
        seen(watch, *answer)
        if watch._question == 2:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._Simulation, "_record_answer", once)
        with pytest.raises(Killed):
            run.start()


SLOW = """
from silodp import Gaussian, Grad, Query


def slow(fed, problem, w, *, rounds: int, step: float, minibatch: Gaussian):
    for r in range(rounds):
        w = w - step * fed.mean(Query(Grad(w), minibatch.at(r)))
        yield w
"""


def not_resumed(run, words):
    before = contents(run.folder)
    with pytest.raises(BadInput, match=words):
        run.start(resume=True)
    assert contents(run.folder) == before


def test_an_edited_forward_is_not_computed_under_the_noise_of_the_one_before(order, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(NET.format("x"))
    cut(order(model="net.py:net"))
    asked = Run(*read_back(tmp_path / "run"), tmp_path / "run")
    file.write_text(NET.format("torch.tanh(3 * x)"))
    not_resumed(asked, "another model_sha256")
    file.write_text(NET.format("x"))
    asked.start(resume=True)
    assert RunFolder(asked.folder).state() == "finished"


@pytest.mark.parametrize(
    "line",
    [
        "import own",
        "from . import own",
        "import importlib",
        "import this",
        "data = open('own.py').read()",
    ],
)
def test_a_model_that_brings_in_what_may_have_changed_is_not_resumed(
    order, tmp_path, monkeypatch, line
):
    """`this` is one's own too: a file of that name in the current folder comes before the
    library's.
    """
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own", "this"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text("")
    file = tmp_path / "net.py"
    file.write_text(NET.format("x") + f"    {line}\n")
    asked = order(model=f"{file}:net")
    cut(asked)
    not_resumed(asked, "is not resumed")


def test_an_edited_algorithm_that_says_it_is_a_shipped_one_is_not_resumed(order, tmp_path):
    """functools.wraps copies the module's name, by which a file was once told."""
    file = tmp_path / "own.py"
    file.write_text(WRAPS.format(1))
    cut(asked := order(algorithm=f"{file}:own"))
    file.write_text(WRAPS.format(2))
    extension._module.cache_clear()  # as in another process
    find.cache_clear()
    not_resumed(asked, "another algorithm_sha256")


@pytest.mark.parametrize("broken", ["", "{}", '{"seed": 1', '{"seed": null, "records": ""}', "[]"])
def test_a_broken_seed_is_refused_in_a_sentence(order, broken):
    cut(asked := order())
    (asked.folder / "seed").write_text(broken)
    not_resumed(asked, "the seed .* cannot be read .*; restore it")


def test_a_model_that_starts_elsewhere_each_time_is_not_resumed(order, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(
        NET.format("x + self.shift").replace(
            "        self.layer",
            "        self.shift = nn.Parameter(torch.rand(features))\n        self.layer",
            1,
        )
    )
    asked = order(model=f"{file}:net")
    cut(asked)
    not_resumed(asked, "another start")


def test_a_run_is_resumed_with_its_own_noise_settings_versions_and_threads_alone(order):
    asked = order(algorithm="spider", anchor_share=0.3)
    cut(asked)
    not_resumed(
        asked._replace(order=replace(asked.order, anchor_share=0.8)), "another anchor_share, noise"
    )
    not_resumed(asked._replace(order=replace(asked.order, slope=0.5)), "another .*settings")
    for package in ("numpy", "scipy", "dp-accounting"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                pinned,
                "version",
                lambda name, other=package: "0.1" if name == other else version(name),
            )
            not_resumed(asked, f"another {package};")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 64)
        not_resumed(asked, "another threads;")


def test_a_run_of_an_algorithm_by_a_relative_path_is_resumed_from_its_folder(order, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    cut(order(algorithm="slow.py:slow"))
    Run(*read_back(tmp_path / "run"), tmp_path / "run").start(resume=True)
    assert RunFolder(tmp_path / "run").state() == "finished"


def test_a_run_that_found_no_room_goes_on_once_there_is_some(order, monkeypatch):
    asked = order(output="tail")
    with monkeypatch.context() as full:
        full.setattr(
            "silodp.server.kept.tempfile.TemporaryFile",
            lambda dir: open("/dev/full", "r+b", buffering=0),  # noqa: SIM115
        )
        with pytest.raises(BadInput, match="make room there, and resume the run"):
            asked.start()
    asked.start(resume=True)
    assert RunFolder(asked.folder).state() == "finished"


def test_a_resumption_that_comes_too_late_writes_nothing(order):
    """Two commands saw an interrupted run; when the second has the lock, the first is done and the
    seed gone.
    """
    asked = order()
    cut(asked)
    asked.start(resume=True)
    not_resumed(asked, "has ended by now")
    for name in ("summary.json", "run.json"):
        (asked.folder / name).rename(asked.folder / f"{name}.off")
        not_resumed(asked, "has ended by now")


def test_a_new_run_that_is_refused_leaves_the_progress_of_the_one_that_is_there(order):
    asked = order()
    asked.start()
    before = contents(asked.folder)
    with pytest.raises(BadInput, match="contains a run already"):
        asked.start()
    assert contents(asked.folder) == before
