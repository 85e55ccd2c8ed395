"""A daemon loads what it serves with and no more: nothing of the laboratory, nor of the server, is
in a process that holds records or boxes.

A command that prints its help loads nothing that computes.
"""

import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mixing import ROSTER, ROUND, SERVER, box, frame
from silodp.cli import app as cli
from silodp.cli.console import Listed
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import Answer, Envelope, decode_reply, encode_query
from silodp.core.protocol.relay import Passed, decode_outcome
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.host.keys import public
from silodp.shuffler import provision as shuffler
from silodp.silo.service.provision import provision
from silodp.wire.socket import Socket

PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well
SLOW = {
    "dp_accounting",
    "matplotlib",
    "pandas",
    "scipy.optimize",
    "scipy.stats",
    "sklearn",
    "sympy",
    "torch._dynamo",
}
"""Seconds of every start, for what no daemon does with records of text and numbers under a budget
of mu.
"""
RUNNER = """
import json, runpy, sys, threading, time
from pathlib import Path
ask, part, told = (Path(sys.argv[1]) / name for name in ("ask", "part", "told"))
def tell():
    while not ask.exists():
        time.sleep(0.01)
    part.write_text(json.dumps(sorted(sys.modules)))
    part.rename(told)
threading.Thread(target=tell, daemon=True).start()
sys.argv = ["silodp", *sys.argv[2:]]
runpy.run_module("silodp.cli", run_name="__main__", alter_sys=True)
"""
HELP = """
import json, sys, typer
from silodp.cli.app import app
def walk(command, *path):
    yield path
    for name in getattr(command, "commands", ()):
        yield from walk(command.commands[name], *path, name)
root, known = typer.main.get_command(app), set()
for path in walk(root):
    root.main([*path, "-h"], "silodp", standalone_mode=False)  # which is --help by another name
    print(json.dumps([" ".join(path), sorted(sys.modules.keys() - known)]), file=sys.stderr)
    known |= sys.modules.keys()
"""


@contextmanager
def serving(folder: Path, *words: str):
    """The daemon of these words, as a process; gives what it printed first and a way to ask which
    modules it has loaded.
    """
    command = [sys.executable, "-c", RUNNER, str(folder), *words, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        first = process.stdout.readline()
        assert first, process.stderr.read()

        def modules() -> set[str]:
            (folder / "ask").touch()
            ends = time.monotonic() + PATIENCE
            while not (folder / "told").exists():
                assert process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.01)
            return set(json.loads((folder / "told").read_text()))

        yield json.loads(first), modules
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def parts(modules: set[str]) -> set[str]:
    """The folders of silodp that were loaded."""
    return {name.split(".")[1] for name in modules if name.startswith("silodp.")}


def test_a_gate_that_has_answered_has_loaded_nothing_of_the_laboratory(folder, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(folder / "state"))
    rows = np.random.default_rng(0).normal(size=(60, 3)).tolist()
    data = folder / "clinic.csv"
    data.write_text(
        "\n".join(
            ["a,b,c,label", *(f"{a!r},{b!r},{c!r},{k % 2}" for k, (a, b, c) in enumerate(rows))]
        )
    )
    data.chmod(0o600)
    asker = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    settings = {"data": data, "label": "label", "name": "clinic", "epsilon": 3.0, "model": "mlp:4"}
    made = provision(folder / "silo", **settings, askers=[public(asker)])
    query = Query(Grad(torch.zeros(1, made.parameters)), Gaussian("anchor", 1.0, 30.0))
    with serving(folder, "silo", "serve", str(made.policy)) as (said, modules):
        raw = Socket(said["socket"]).ask(
            encode_query(Envelope("clinic", "run", "first", made.definition, query), asker),
            PATIENCE,
        )
        assert isinstance(decode_reply(raw, limit=2**20, silo_key=made.key), Answer)
        loaded = modules()
    assert {"silodp.silo.gate", "silodp.cli.silo"} <= loaded
    assert parts(loaded) <= {"cli", "core", "engine", "host", "silo"}
    assert not loaded & SLOW
    assert {name for name in loaded if name.startswith("silodp.cli.")} <= {
        f"silodp.cli.{name}" for name in ("app", "console", "silo", "silo_officer", "__main__")
    }


def test_a_shuffler_that_has_passed_on_a_total_has_loaded_nothing_of_the_laboratory(folder):
    card = shuffler.provision(folder / "mixer", askers=[public(SERVER)], members=ROSTER)
    with serving(
        folder, "federation", "shuffler", "serve", str(folder / "mixer" / "shuffler.toml")
    ) as (
        said,
        modules,
    ):
        boxes = [box(i, ROUND, key=card["seal"]) for i in range(4)]
        raw = Socket(said["socket"]).ask(frame(*boxes), PATIENCE)
        assert isinstance(decode_outcome(raw, limit=10**4, shuffler_key=card["sign"]), Passed)
        loaded = modules()
    assert {"silodp.shuffler.daemon", "silodp.cli.shuffler"} <= loaded
    assert parts(loaded) <= {"cli", "core", "host", "shuffler"}
    assert not loaded & {*SLOW, "torch"}


def test_listing_and_completing_commands_loads_none_of_them(monkeypatch):
    def refuse(listed):
        raise AssertionError(f"{listed.name} was loaded")

    monkeypatch.setattr(Listed, "load", refuse)
    group = typer.main.get_command(cli.app)
    context = group.make_context("silodp", ["-h"], resilient_parsing=True)
    assert "train" in [item.value for item in group.shell_complete(context, "tr")]
    with pytest.raises(AssertionError, match="train was loaded"):
        group.get_command(context, "train")


def test_help_of_every_command_and_group_loads_nothing_that_computes():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    told = dict(
        json.loads(line) for line in done.stderr.splitlines()
    )  # what each has loaded that those before it had not
    assert {"", "train", "silo", "federation run", "ledger write-off"} <= told.keys()
    assert done.stdout.count("Usage: silodp") == len(told)
    computing = {*SLOW, "flwr", "numpy", "nvflare", "scipy", "torch"}
    assert {
        words: loaded
        for words, modules in told.items()
        if (loaded := sorted(computing & {*modules}))
    } == {}
