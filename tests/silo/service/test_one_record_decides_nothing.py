"""A server writes the schema and the map of features. Whether a gate starts, and how it answers,
must say nothing of one record, whatever that record holds.
"""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from gate_process import ASKER, asked
from test_daemon_start import started

from silodp.core.protocol.codec import Answer, decode_reply
from silodp.core.statistics import ClassCounts, Grad, MissingRates, Score
from silodp.host import metrics
from silodp.host.cards import read_card
from silodp.silo.data.faults import Faults
from silodp.silo.data.reading import find_schema
from silodp.silo.data.tables import read_table
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service import daemon
from silodp.silo.service.daemon import open_door
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision

SCHEMA = """
[columns.a]
type = "number"
range = [0, 10]
[columns.sex]
type = "category"
categories = ["f", "m"]
[columns.smoker]
type = "boolean"
[label]
column = "{label}"
task = "{task}"
{more}
"""
TASKS = {
    "binary": ("outcome", 'classes = ["0", "1"]'),
    "regression": ("value", "range = [0, 5]"),
    "count": ("visits", "most = 9"),
}
GOOD = "4.5,f,yes,1,2.5,3"
BAD = {
    "unknown category": ("binary", "4.5,x,yes,1,2.5,3"),
    "missing category": ("binary", "4.5,,yes,1,2.5,3"),
    "missing value": ("binary", ",f,yes,1,2.5,3"),
    "no number": ("binary", "4.5kg,f,yes,1,2.5,3"),
    "infinite number": ("binary", "inf,f,yes,1,2.5,3"),
    "no boolean": ("binary", "4.5,f,perhaps,1,2.5,3"),
    "unknown class": ("binary", "4.5,f,yes,7,2.5,3"),
    "missing class": ("binary", "4.5,f,yes,,2.5,3"),
    "label that is no number": ("regression", "4.5,f,yes,1,much,3"),
    "missing number to predict": ("regression", "4.5,f,yes,1,,3"),
    "count below 0": ("count", "4.5,f,yes,1,2.5,-3"),
    "count that is not whole": ("count", "4.5,f,yes,1,2.5,0.5"),
    "a comma too many": ("binary", "4,5,f,yes,1,2.5,3"),
    "a cell too few": ("binary", "4.5,f,yes,1"),
    "bytes that are no text": ("binary", "4.5,\udcff\udcfe,yes,\udcff,2.5,3"),
    "a cell too few of no text": ("binary", "\udcff\udcfe,f"),
    "cells with NUL and BOM": ("binary", "4.5\0,\ufefff,yes\0,\ufeff1,2.5,3"),
    "numbers without end": ("regression", f"{'9' * 5000},f,yes,1,-{'9' * 5000},3"),
    "numbers beyond the floats": ("regression", "-1e309,f,yes,1,1e309,3"),
    "a very long cell": ("binary", f"4.5,{'f' * 3_000_000},yes,1,2.5,3"),
    "a very long cell of no text": ("binary", "4.5," + 1_500_000 * "\udcff" + ",yes,1,2.5,3"),
    "everything": ("binary", "?,?,?,?,?,?"),
}
N, AT = 40, 17


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Makes a folder for a hospital with a machine of its own."""

    def of(name: str) -> Path:
        monkeypatch.setenv("SILODP_STATE", str(tmp_path / name / "state"))
        (tmp_path / name).mkdir()
        return tmp_path / name

    return of


def write(path: Path, row: str) -> Path:
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.uniform(0, 10)!r},{'fm'[k % 2]},{'yes' if k % 3 else 'no'},{k // 2 % 2},"
        f"{rng.uniform(0, 5)!r},{k % 7}"
        for k in range(N)
    ]
    rows[AT] = row
    text = "a,sex,smoker,outcome,value,visits\n" + "\n".join(rows) + "\n"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(0o600)
    return path


def silo_of(folder: Path, task: str, **more):
    label, words = TASKS[task]
    schema = folder / "schema.toml"
    ignored = [name for name, _ in TASKS.values() if name != label]
    text = f"ignore = {json.dumps(ignored)}\n" + SCHEMA.format(label=label, task=task, more=words)
    schema.write_text(text)
    schema.chmod(0o600)
    data = write(folder / "clinic.csv", GOOD)
    model = "logistic" if task == "binary" else "linear"
    settings = {"data": data, "label": "", "name": "clinic", "epsilon": 3.0, "model": model}
    settings |= {"askers": [ASKER], "schema": schema, "held_out": 0.25}
    return provision(folder / "silo", **settings | more)


def opened(silo, told=None):
    place = DaemonSettings.load(silo.policy)
    ledger = DurableLedger.open(Path(place.ledger))
    tell = (told if told is not None else []).append
    return open_door(Policy.load(silo.policy), place, None, ledger, tell=tell)[0]


def frames(silo) -> list[bytes]:
    w = torch.zeros(1, silo.parameters)
    statistics = [Grad(w), Score(w, 4, 1.0), MissingRates(5), ClassCounts(2)]
    return [asked(silo, f"q{k}", statistic) for k, statistic in enumerate(statistics)]


def shapes_of(silo, door) -> list[tuple]:
    """What anybody else sees of a gate's replies, but for the noisy numbers themselves."""
    seen = []
    for frame in frames(silo):
        reply = door.handle(frame)
        said = decode_reply(reply, limit=2**20, silo_key=silo.key)
        seen.append((type(said).__name__, getattr(said, "code", ""), len(reply)))
    return seen


@pytest.mark.parametrize("what", BAD)
def test_no_record_decides_whether_a_gate_starts_or_which_codes_it_gives(home, what):
    task, row = BAD[what]
    seen = []
    for name, mine in (("with", row), ("without", GOOD)):
        folder = home(name)
        silo = silo_of(folder, task)
        write(folder / "clinic.csv", mine)
        assert started(silo.policy) == "started"
        told = []
        door = opened(silo, told)
        assert bool(told) == (mine != GOOD), told
        assert not any(cell in sentence for sentence in told for cell in ("4.5", "perhaps"))
        seen.append(shapes_of(silo, door))
    assert seen[0] == seen[1]
    assert seen[0][0][0] == Answer.__name__


def test_without_a_schema_too_a_record_that_cannot_be_read_counts_as_zero(home):
    """Numbers alone, and a label of two classes."""
    rows = [f"{k},{k % 5},{k % 2}" for k in range(N)]
    for k, bad in enumerate(("x,1,1", ",1,1", "1e999,1,1", "1,1,7", "1,1,", "1,2,3,4", "1")):
        folder = home(str(k))
        data = folder / "clinic.csv"
        data.write_text("\n".join(["a,b,outcome", *rows]))
        data.chmod(0o600)
        silo = provision(
            folder / "silo", data=data, label="outcome", name="clinic", epsilon=3.0,
            model="logistic", askers=[ASKER],
        )  # fmt: skip
        data.write_text("\n".join(["a,b,outcome", *rows[:AT], bad, *rows[AT + 1 :]]))
        told = []
        door = opened(silo, told)
        assert door.void == 1
        assert "1 records cannot be used" in told[-1]
        assert shapes_of(silo, door)[0][0] == Answer.__name__


MAPS = {
    "raises": "def own(row):\n    assert row[0] < 0.89\n    return row * 2\n",
    "ends the process": "import sys\n\n\ndef own(row):\n    row[0] < 0.89 or sys.exit(1)\n"
    "    return row * 2\n",
    "gives inf": "def own(row):\n    return row * 2 / (row[0] < 0.89)\n",
    "gives another length": "def own(row):\n    return row[: 4 if row[0] < 0.89 else 3] * 2\n",
}
EXTREME = "9.9,f,yes,1,2.5,3"
EDITED = "4.25,m,yes,0,2.5,3"


@pytest.mark.parametrize("what", MAPS)
def test_a_map_that_fails_on_one_record_makes_that_record_zero_and_the_gate_serves(
    home, tmp_path, what
):
    file = tmp_path / "own.py"
    file.write_text(MAPS[what].replace("def own(row):\n", f"def own(row):\n    {CALM}\n"))
    file.chmod(0o600)
    seen = []
    for name, mine in (("with", EXTREME), ("without", GOOD)):
        folder = home(name)
        silo = silo_of(folder, "binary", feature_map=f"{file}:own")
        path = write(folder / "clinic.csv", mine)
        calm(path)
        assert started(silo.policy) == "started"
        door = opened(silo)
        assert door.void == (mine == EXTREME)
        seen.append(shapes_of(silo, door)[:2])
    assert seen[0] == seen[1]
    assert seen[0][0][0] == Answer.__name__


CALM = "row = row.clone()"


def calm(path: Path) -> None:
    """Keep every other record where the map works."""
    head, *rows = path.read_text().splitlines()
    for k, row in enumerate(rows):
        first, rest = row.split(",", 1)
        rows[k] = row if k == AT else f"{min(float(first), 9.0)!r},{rest}"
    path.write_text("\n".join([head, *rows]) + "\n")


def test_what_could_not_be_read_counts_as_the_public_value_or_as_nothing_and_n_stays(home):
    folder = home("one")
    silo = silo_of(folder, "binary")
    schema = find_schema(DaemonSettings.load(silo.policy))
    good = read_table(write(folder / "clinic.csv", GOOD), schema)
    for row, zero in (("x,x,x,1,2,3", False), ("1,f,no,x,2,3", True), ("1,f,no,1,2,3,4,5", True)):
        faults = Faults()
        table = read_table(write(folder / "clinic.csv", row), schema, faults)
        assert table.x.shape == good.x.shape
        others = np.arange(N) != AT
        assert np.array_equal(table.x[others], good.x[others]), "everybody else stays in place"
        assert np.array_equal(table.y[others], good.y[others])
        assert table.void[AT] == zero
        assert not table.void[others].any()
        if not zero:
            assert not table.x[AT].any(), "the middle of each range, and no category"
            assert table.missing[AT].all()


def test_a_void_record_moves_no_sum_and_its_neighbours_integers_stay(home):
    """The sums with such a record are those of all others."""
    folder = home("one")
    silo = silo_of(folder, "binary")
    sums = []
    for row in ("1,f,no,x,2,3", "9,m,yes,,2,3", "1,2"):
        write(folder / "clinic.csv", row)
        exact = opened(silo)._exact
        w = torch.full((1, silo.parameters), 0.3, dtype=torch.float64)
        rows = exact._rows_of(Grad(w))
        sums.append(exact._sum(rows, np.arange(N), 1.0, 2.0**-20, silo.parameters))
        without = exact._sum(
            rows, np.flatnonzero(np.arange(N) != AT), 1.0, 2.0**-20, silo.parameters
        )
        assert np.array_equal(sums[-1], without)
    assert all(np.array_equal(sums[0], one) for one in sums)


def test_no_count_of_such_records_leaves_by_card_metrics_log_or_status(home, capfd):
    """The hospital reads them on its own screen, and nobody elsewhere."""
    outside = []
    for name, mine in (("with", "?,?,?,?,?,?"), ("without", EDITED)):
        folder = home(name)
        silo = silo_of(folder, "binary")
        write(folder / "clinic.csv", mine)
        told, (stop, tell) = [], socket.socketpair()
        with stop, tell:
            tell.sendall(b"!")
            daemon.serve(silo.policy, stop, lambda *_: None, tell=told.append)
        assert bool(told) == (mine != EDITED)
        card = read_card(folder / "silo/silo.json")
        log = Path(DaemonSettings.load(silo.policy).log).read_text()
        assert "cannot be used" not in log
        lines = [line.split(" ", 1)[1] for line in log.splitlines()]
        outside.append((card.records, card.parameters, card.features, lines, metrics.text("gate")))
        assert "cannot be used" not in capfd.readouterr().out
    assert outside[0] == outside[1]
