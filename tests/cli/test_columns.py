"""Every command in 80 columns: lines are broken between words, commands and hashes stay whole, and
a table that does not fit is a list.
"""

import re

import pytest

from silodp.cli import console

WIDE = re.compile(r"[0-9a-f]{64}|^ +silodp |/")
"""What may be wider: a whole hash, a whole command, a path."""


@pytest.fixture
def silodp(said, monkeypatch, tmp_path):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "80")
    return said


def narrow(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 80 and not WIDE.search(line)]


TRAIN = (
    "--silo",
    "a.csv",
    "--silo",
    "b.csv",
    "--algorithm",
    "mb-sgd",
    "--model",
    "logistic",
    "--rounds",
    2,
    "--step",
    1,
    "--seed",
    1,
)


def test_what_commands_print_fits_and_breaks_no_hash(silodp, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(
            "x,y,label\n" + "".join(f"{k % 13},{k % 7}.5,{k % 2}\n" for k in range(60))
        )
        (tmp_path / f"{name}.csv").chmod(0o600)
    asker = f"the university of somewhere={'ab' * 32}"
    said = [
        silodp("init", "trial", "--demo"),
        silodp(
            "silo",
            "init",
            "gate",
            "--data",
            "a.csv",
            "--epsilon",
            3,
            "--model",
            "logistic",
            "--asker",
            asker,
            "--name",
            "clinic",
        ),
        silodp(
            "plan",
            "--records",
            1000,
            "--silos",
            3,
            "--algorithm",
            "mb-sgd",
            "--rounds",
            5,
            "--model",
            "logistic",
            "--features",
            4,
        ),
        silodp("train", *TRAIN, "--epsilon", 1, "--held-out", 0.2),
        silodp("evaluate", "runs/train", "--epsilon", 5, "--seed", 1),
        silodp("export", "card", "runs/train"),
        silodp("silo", "status", "gate/policy.toml"),
        silodp("silo", "attest", "gate/policy.toml", "--by", "A. Officer"),
        silodp(
            "federation",
            "propose",
            "second",
            "--card",
            "gate/silo.json",
            "--prox",
            "squared-l2:0.1",
        ),
        silodp("silo", "approve", "second.toml", "gate/policy.toml", "--yes"),
        silodp("status", "gate"),
        silodp("status", "trial"),
        silodp("ledger", "verify", "gate/ledger.db"),
    ]
    spend(tmp_path)
    said.append(silodp("ledger", "show", "gate/ledger.db"))
    shown = said.pop(5), said[-1]  # a card is markdown, for a file
    assert shown[0]
    for text in said:
        assert narrow(text) == []
    assert "the university of somewhere, study second: 1 questions" in " ".join(said[-1].split())
    assert not re.search(r"\b[0-9a-f]{9,}", said[-1]), "names, and the first digits of a run"


def spend(folder) -> None:
    from silodp.core.events import Event
    from silodp.core.sampling import FullBatch
    from silodp.silo.ledger.durable import DurableLedger

    ledger = DurableLedger.open(folder / "gate/ledger.db")
    asked = {
        "query_id": "q" * 40,
        "digest": bytes(32),
        "kind": "minibatch",
        "asker": "ab" * 32,
        "run": "0123456789abcdef" * 2,
    }
    ledger.for_query(**asked, generation=0).charge(Event(FullBatch(), 8.0), [0])


def test_a_command_in_a_sentence_stays_whole_and_a_table_that_does_not_fit_is_a_list(
    monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "40")
    console.say(
        "Many words that are longer than a line, and then next: silodp ledger show "
        "some/long/path/to/a/ledger.db"
    )
    console.say("It refuses, and `silodp silo resume policy.toml` ends that, as one would hope.")
    console.show(console.table("one|two!|three!", [("a" * 9, "b" * 20, "c" * 20)]))
    said = capsys.readouterr().out
    assert "\n  silodp ledger show some/long/path/to/a/ledger.db\n" in said
    assert "`silodp silo resume policy.toml`" in said
    assert "│" not in said
    assert ("b" * 20 in said, "c" * 20 in said) == (True, True)
