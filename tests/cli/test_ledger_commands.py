"""`silodp ledger`: what the data officer and the auditor see, and what they are told when something
is wrong.
"""

import contextlib
import csv
import io
import json
import sqlite3
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from silodp.core.events import Event, TotalEvent
from silodp.core.figures import rounded_up
from silodp.core.sampling import FullBatch, Poisson
from silodp.silo.ledger.chain import Entry
from silodp.silo.ledger.durable import DurableLedger


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "160")
    generator = np.random.default_rng(0)
    lines = [f"{a:.5f},{b:.5f},{k % 2}" for k, (a, b) in enumerate(generator.normal(size=(50, 2)))]
    (tmp_path / "clinic.csv").write_text("\n".join(["a,b,outcome", *lines]))
    return tmp_path / "clinic.csv"


@pytest.fixture
def silodp(silodp):
    return partial(silodp, "ledger")


@pytest.fixture
def path(data, silodp, tmp_path):
    code, _, error = silodp(
        "create", tmp_path / "clinic.ledger", "--data", data, "--label", "outcome", "--epsilon", 3
    )
    assert (code, error) == (0, "")
    return tmp_path / "clinic.ledger"


def ask(path, query_id: str, asker="server-7") -> None:
    asked = DurableLedger.open(path).for_query(
        query_id=query_id, digest=bytes(32), kind="anchor", asker=asker, run="run-1", generation=0
    )
    asked.charge(Event(FullBatch(), 3.0), [0])
    asked.store(b"SECRET ANSWER")


def test_create_makes_a_ledger_with_delta_of_one_over_n_squared(data, silodp, tmp_path):
    code, text, _ = silodp(
        "create",
        tmp_path / "l",
        "--data",
        data,
        "--label",
        "outcome",
        "--epsilon",
        2,
        "--anchor",
        tmp_path / "anchor",
        "--json",
    )
    made = json.loads(text)
    assert (code, made["epsilon"], made["delta"], made["records"], made["rule"]) == (
        0,
        2,
        1 / 2500,
        50,
        "gdp",
    )
    assert (made["spent_epsilon"], made["used"], made["count"]) == (0, 0, 0)
    assert made["anchor"] == str(tmp_path / "anchor")
    assert (tmp_path / "anchor").exists()


@pytest.mark.parametrize(
    ("words", "event"),
    [
        (["--rule", "renyi"], Event(Poisson(0.5), 9.0)),
        (["--rule", "renyi:12.5"], Event(FullBatch(), 9.0)),
        (
            ["--rule", "committed", "--schedule", "poisson:0.1:1.5:20", "--schedule", "full:8:2"],
            Event(Poisson(0.1), 1.5),
        ),
    ],
)
def test_create_takes_every_rule(data, silodp, tmp_path, words, event):
    code, _, error = silodp(
        "create",
        tmp_path / "l",
        "--data",
        data,
        "--label",
        "outcome",
        "--epsilon",
        4,
        "--delta",
        1e-5,
        *words,
    )
    assert (code, error) == (0, "")
    DurableLedger.open(tmp_path / "l").for_query(
        query_id="q", digest=b"", kind="", asker="", run="", generation=0
    ).charge(event, [0])
    assert silodp("verify", tmp_path / "l")[0] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--epsilon", "0"], "epsilon is 0; it must be greater than 0"),
        (["--epsilon", "inf"], "epsilon is inf; a durable ledger needs a finite one"),
        (["--epsilon", "1", "--delta", "2"], "delta is 2; it must lie strictly between 0 and 1"),
        (
            ["--epsilon", "1", "--rule", "pld"],
            "--rule is 'pld'; it must be gdp, renyi, renyi:ORDER or committed",
        ),
        (
            ["--epsilon", "1", "--rule", "renyi:0.5"],
            "the Renyi order is 0.5; it must be greater than 1",
        ),
        (["--epsilon", "1", "--rule", "renyi:many"], "'many' must be a number greater than 0"),
        (["--epsilon", "1", "--rule", "committed"], "the committed rule needs a schedule"),
        (
            ["--epsilon", "1", "--schedule", "full:1:1"],
            "--schedule is given 1 times, but the rule is gdp",
        ),
        (
            ["--epsilon", "1", "--rule", "committed", "--schedule", "half:1:1"],
            "--schedule is 'half:1:1'; it must be full:",
        ),
        (
            ["--epsilon", "1", "--rule", "committed", "--schedule", "poisson:2:1:1"],
            "a rate must be between 0 and 1",
        ),
        (
            ["--epsilon", "1", "--rule", "committed", "--schedule", "full:1:1.5"],
            "a count must be a whole number",
        ),
        (["--epsilon", "1", "--label", "missing"], "has no label column 'missing'"),
    ],
)
def test_bad_input_gets_one_sentence_and_leaves_nothing(data, silodp, tmp_path, words, sentence):
    code, text, error = silodp(
        "create", tmp_path / "l", "--data", data, "--label", "outcome", *words
    )
    assert (code, text) == (2, "")
    assert sentence in error
    assert error.startswith("silodp: ")
    assert error.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "state") == ["clinic.csv"]


def test_a_second_ledger_for_the_same_file_under_another_name_is_refused(
    path, data, silodp, tmp_path
):
    data.rename(tmp_path / "renamed.csv")
    code, _, error = silodp(
        "create",
        tmp_path / "second",
        "--data",
        tmp_path / "renamed.csv",
        "--label",
        "outcome",
        "--epsilon",
        3,
    )
    assert code == 2
    assert f"100% of its records in common with the one whose ledger is {path}" in error
    code, _, error = silodp(
        "create", path, "--data", tmp_path / "renamed.csv", "--label", "outcome", "--epsilon", 3
    )
    assert code == 2


def test_show_says_in_words_who_asked_what_when_and_what_is_left(path, silodp):
    code, text, _ = silodp("show", path)
    assert code == 0
    assert "There are no queries yet." in text
    assert "0.0 % of the budget is used" in text
    for k in range(3):
        ask(path, f"q{k}", asker="[red]server-7[/red] :skull:" if k == 2 else "server-7")
    DurableLedger.open(path).purge("q0")
    DurableLedger.open(path).for_query(
        query_id="q3", digest=b"", kind="refine", asker="server-8", run="run-2", generation=0
    ).charge(Event(FullBatch(), 8.0), [0])
    code, text, _ = silodp("show", path)
    assert code == 0
    told = json.loads(silodp("show", path, "--json")[1])
    used = 1 - told["queries"][-1]["left"]
    share = f"{rounded_up(100 * used, 1, 'f')} % of the budget is used"
    assert f"{share}: epsilon {rounded_up(told['spent_epsilon'], 4)} of 3 (delta" in text
    assert text.count("█") == round(40 * used)
    for word in (
        "epsilon 1.8",
        "gdp rule",
        "50 records",
        "server-7",
        "[red]server-7[/red] :skull:",
        "anchor",
        "purged",
        "kept",
        "not yet",
    ):
        assert word in " ".join(text.split())
    _, text, _ = silodp("show", path, "--last", 1)
    assert "4 questions, the latest 1" in text
    assert "server-8" in text
    assert "server-7" not in text


def test_show_as_json_adds_up(path, silodp):
    for k in range(3):
        ask(path, f"q{k}")
    shown = json.loads(silodp("show", path, "--json")[1])
    assert [q["query_id"] for q in shown["queries"]] == ["q0", "q1", "q2"]
    assert sum(q["cost"] for q in shown["queries"]) == pytest.approx(shown["used"])
    assert shown["queries"][-1]["left"] == pytest.approx(1 - shown["used"])
    assert shown["spent_epsilon"] + shown["left_epsilon"] == pytest.approx(3)
    assert "SECRET" not in json.dumps(shown)


def test_verify_says_so_or_exits_2_with_what_is_wrong(path, silodp):
    ask(path, "q")
    code, text, error = silodp("verify", path)
    assert (code, error) == (0, "")
    assert "is intact: 2 entries" in text
    good = json.loads(silodp("verify", path, "--json")[1])
    assert (good["ok"], good["entries"]) == (True, 2)
    assert good["head"] in text
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE entries SET asker = 'nobody' WHERE sequence = 1")
    code, text, error = silodp("verify", path)
    assert (code, text) == (2, "")
    assert error == f"silodp: the ledger {path} is refused: entry 1 does not match its hash\n"
    code, text, _ = silodp("verify", path, "--json")
    assert (code, json.loads(text)["ok"]) == (2, False)
    assert silodp("show", path)[0] == silodp("export", path)[0] == 2


def test_verify_of_a_missing_ledger_exits_2(silodp, tmp_path):
    code, _, error = silodp("verify", tmp_path / "none")
    assert code == 2
    assert "there is no ledger at" in error
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("rule", "event"),
    [("gdp", Event(FullBatch(), 3.0)), ("gdp", TotalEvent(FullBatch(), 30.0, 1, 4))],
)
def test_who_looks_after_a_ledger_loads_no_torch(data, silodp, tmp_path, rule, event):
    code, _, error = silodp(
        "create",
        tmp_path / "l",
        "--data",
        data,
        "--label",
        "outcome",
        "--epsilon",
        9,
        "--rule",
        rule,
    )
    assert (code, error) == (0, "")
    asked = {
        "query_id": "q",
        "digest": b"",
        "kind": "",
        "asker": "",
        "run": "",
        "round": "ab" * 32 if event.total else "",
        "generation": 0,
    }
    DurableLedger.open(tmp_path / "l").for_query(**asked).charge(event, [0])
    code = """
import sys
from silodp.cli.app import app
for words in (["verify", "l"], ["fsck", "l"], ["backup", "l", "copy"], ["export", "l", "--format", "csv"], ["release", "l"]):
    app(["ledger", *words], standalone_mode=False)
sys.exit("torch" in sys.modules)"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "is intact: 1 entries" in done.stdout


def test_export_has_every_entry_as_it_was_hashed_and_neither_answers_nor_sketch(
    path, silodp, tmp_path
):
    ask(path, "q0", asker="=cmd()")
    ask(path, "q1")
    entries = list(DurableLedger.open(path).entries())
    _, text, _ = silodp("export", path)
    rows = [json.loads(line) for line in text.splitlines()]
    for row, entry in zip(rows, entries, strict=True):
        assert Entry.of(tuple(row[name] for name in entry.__slots__)) == entry
        assert (row["amount_decimal"], row["total_decimal"]) == (entry.amount, entry.total)
    code, said, _ = silodp("export", path, "--format", "csv", "--out", tmp_path / "e.csv")
    assert (code, "4 entries are in" in said) == (0, True)
    with (tmp_path / "e.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["hash"] for row in table] == [entry.hash for entry in entries]
    assert table[0]["asker"] == "'=cmd()"  # a spreadsheet must not run it
    with contextlib.closing(sqlite3.connect(path)) as connection:
        key, marks = connection.execute("SELECT key, marks FROM identity").fetchone()
    for content in (text, (tmp_path / "e.csv").read_text()):
        assert "SECRET" not in content
        assert key.hex() not in content
        assert marks[:16].hex() not in content
    whole = json.loads(silodp("export", path, "--json")[1])
    assert whole["entries"] == rows
    assert json.loads(silodp("export", path, "--json", "--out", tmp_path / "f")[1]) == {
        "entries": 4,
        "file": str(tmp_path / "f"),
    }
    assert next(csv.reader(io.StringIO(silodp("export", path, "--format", "csv")[1])))[:3] == [
        "sequence",
        "time",
        "act",
    ]


def test_export_overwrites_nothing_and_knows_two_formats(path, silodp, tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, _, error = silodp("export", path, "--out", tmp_path / "mine")
    assert (code, (tmp_path / "mine").read_text()) == (2, "mine")
    assert "exists already" in error
    code, _, error = silodp("export", path, "--format", "xml")
    assert code == 2
    assert "--format is 'xml'; it must be jsonl or csv" in error
    code, _, error = silodp("export", path, "--out", tmp_path / "no" / "where")
    assert code == 2
    assert "cannot be written" in error
