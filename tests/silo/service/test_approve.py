"""Another study for the same records: an officer reads what changes and agrees, and the budget goes
on; nothing is run, or written, before.
"""

import json
import signal
import tomllib
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from gate_process import ASKER, Process, asked, made, write_data

from silodp.cli import app as cli
from silodp.core.errors import BadInput
from silodp.core.protocol.codec import Answer
from silodp.host.cards import read_card
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.view import queries_of
from silodp.silo.service.approve import approvals, approve, compare, edited
from silodp.silo.service.daemon import open_door
from silodp.silo.service.names import runs_of
from silodp.silo.service.policy import DaemonSettings, Policy

CODE = (
    "import torch\nfrom pathlib import "
    "Path\nPath(__file__).parent.joinpath('ran').touch()\n\n\ndef build(features, outputs):\n  "
    "  return torch.nn.Linear(features, outputs)\n"
)
SCHEMA = """
[columns.a]
type = "number"
range = [-3, 3]
{more}
[label]
column = "{label}"
task = "{task}
"""


def silodp(*words: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["silodp", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    return tmp_path


def propose(silo, name: str, *more: object) -> Path:
    card = Path(silo.policy).parent / "silo.json"
    assert (
        silodp("federation", "propose", name, "--card", card, "--out", card.parent.parent, *more)
        == 0
    )
    return card.parent.parent / f"{name}.toml"


def schema(
    folder: Path,
    name: str,
    label: str = "outcome",
    task: str = 'binary"\nclasses = ["0", "1"]',
    more: str = "",
) -> Path:
    path = folder / f"{name}.toml"
    ignored = [
        column
        for column in ("b", "c", "outcome")
        if column != label and f"columns.{column}" not in more
    ]
    path.write_text(
        f"ignore = {json.dumps(ignored)}\n" + SCHEMA.format(label=label, task=task, more=more)
    )
    return path


def ledger_of(silo) -> DurableLedger:
    return DurableLedger.open(Path(DaemonSettings.load(silo.policy).ledger))


def opened(policy: str):
    place = DaemonSettings.load(policy)
    return open_door(Policy.load(policy), place, None, DurableLedger.open(Path(place.ledger)))


def spend(silo, query_id: str) -> None:
    door, _, _ = opened(silo.policy)
    card = read_card(Path(silo.policy).with_name("silo.json"))
    door.handle(
        asked(replace(silo, parameters=card.parameters, definition=card.definition), query_id)
    )


def test_a_gate_that_runs_takes_up_another_study_and_its_ledger_goes_on(home):
    process = Process(made(home, registry=None), home)
    old, path = process.silo, Path(process.silo.policy)
    assert isinstance(process.reply(asked(old, "first")), Answer)
    used = ledger_of(old).used()
    assert (
        silodp(
            "silo",
            "approve",
            propose(old, "second", "--model", "logistic"),
            path,
            "--yes",
            "--by",
            "A. Officer",
        )
        == 0
    )
    card = read_card(path.with_name("silo.json"))
    assert (card.study, card.model) == ("second", "logistic")
    assert process.reply(asked(old, "before")).code == "model"
    process.silo = replace(old, parameters=card.parameters, definition=card.definition)
    assert isinstance(process.reply(asked(process.silo, "after")), Answer)
    assert ledger_of(old).used() == pytest.approx(2 * used)
    assert [entry["study"] for entry in approvals(path)] == ["second"]
    assert process.end(signal.SIGTERM) == 0
    assert process.errors.read_bytes() == b""


def test_a_question_is_of_the_study_that_it_was_asked_for_though_the_next_was_approved_in_the_same_second(  # noqa: E501
    home, monkeypatch
):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, 12, 0, 0, 700_000, tz)

    silo = made(home, registry=None, study="first")
    study = propose(silo, "second", "--model", "logistic")
    monkeypatch.setattr("silodp.silo.ledger.file.now", lambda: "2026-01-01T12:00:00.200+00:00")
    spend(silo, "early")
    monkeypatch.setattr("silodp.silo.service.approve.datetime", Clock)
    assert silodp("silo", "approve", study, silo.policy, "--yes") == 0
    ledger = ledger_of(silo)
    (run,) = runs_of(ledger, queries_of(ledger))
    assert (run["study"], run["questions"]) == ("first", 1)


def test_what_changes_is_said_in_words_and_a_no_changes_nothing(home, capsys, monkeypatch):
    silo = made(home, registry=None, study="first")
    (home / "model.py").write_text(CODE)
    study, before = (
        propose(silo, "second", "--model", f"{home / 'model.py'}:build"),
        Path(silo.policy).read_bytes(),
    )
    assert f"Then here: silodp federation run --model {home / 'model.py'}:build" in " ".join(
        capsys.readouterr().out.split()
    )
    (home / "ran").unlink()  # the server has run its own copy
    monkeypatch.setattr("typer.confirm", lambda question: False)
    capsys.readouterr()
    assert silodp("silo", "approve", study, silo.policy) == 2
    said = capsys.readouterr().out
    assert "model mlp:4 -> model.py:build (file " in " ".join(said.split())
    assert "label            outcome (0, 1), as before" in said
    assert "0.0 % of the budget is used, epsilon 0 of 3. Approval refreshes nothing." in said
    assert "model.py, will run in the gate: read it first" in said
    assert Path(silo.policy).read_bytes() == before
    assert not (home / "silo/approved").exists()
    assert not list(home.rglob("ran")), "nobody has run the study's code at the silo"
    assert [line for line in said.splitlines() if "." not in line and len(line) > 80] == []


def test_code_is_approved_by_its_bytes_which_the_silo_keeps_for_itself(home):
    silo = made(home, registry=None)
    (home / "server").mkdir()
    (home / "server/model.py").write_text(CODE)
    study = propose(silo, "second", "--model", f"{home / 'server/model.py'}:build")
    (home / "model.py").write_text(CODE + "# another\n")
    with pytest.raises(BadInput, match="is not the file of which the study second was made"):
        compare(Path(silo.policy), study)
    (home / "model.py").write_text(CODE)
    approve(compare(Path(silo.policy), study))
    (home / "model.py").write_text("raise SystemExit('edited after the approval')")
    opened(silo.policy)
    (own,) = (home / "silo/approved").glob("*-model.py")
    own.write_text(CODE + "# edited at the silo\n")
    with pytest.raises(BadInput, match="approves a model file with SHA-256"):
        opened(silo.policy)


def test_the_servers_copy_may_be_spelled_as_the_silos_spell_theirs_and_what_only_a_card_names_is_not_run(  # noqa: E501
    home, capsys, monkeypatch
):
    silo, card = made(home, registry=None), home / "silo/silo.json"
    (home / "server").mkdir()
    (home / "server/model.py").write_text(CODE)
    approve(
        compare(
            Path(silo.policy),
            propose(silo, "second", "--model", f"{home / 'server/model.py'}:build"),
        )
    )
    assert read_card(card).model == "model.py:build"
    monkeypatch.chdir(home / "server")
    capsys.readouterr()
    assert silodp("federation", "propose", "third", "--card", card, "--prox", "squared-l2:0.1") == 2
    assert "give this server's own copy of it with --model FILE.py:NAME" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (home / "server/third.toml").exists()
    assert (
        silodp(
            "federation",
            "propose",
            "third",
            "--card",
            card,
            "--prox",
            "squared-l2:0.1",
            "--model",
            "model.py:build",
        )
        == 0
    )


def test_a_study_whose_words_make_another_definition_is_not_approved(home):
    silo = made(home, registry=None)
    study, before = propose(silo, "second", "--model", "logistic"), Path(silo.policy).read_bytes()
    study.write_text(study.read_text().replace('"logistic"', '"mlp:7"'))
    with pytest.raises(BadInput, match="approves the study second by its definition"):
        approve(compare(Path(silo.policy), study))
    assert Path(silo.policy).read_bytes() == before
    assert not approvals(Path(silo.policy))


def test_another_label_and_other_columns_of_the_same_records_go_on_with_what_is_spent(home):
    silo = made(home, registry=None)
    spend(silo, "first")
    used, entries = ledger_of(silo).used(), list(ledger_of(silo).entries())
    for name, other in (
        ("columns", schema(home, "one", more='[columns.b]\ntype = "number"\nrange = [-3, 3]\n')),
        ("label", schema(home, "two", label="c", task='regression"\nrange = [-3, 3]')),
    ):
        study = propose(
            silo,
            name,
            "--schema",
            other,
            "--model",
            "linear" if name == "label" else "logistic",
            "--out",
            home / name,
        )
        approve(compare(Path(silo.policy), home / name / study.name))
        assert ledger_of(silo).used() == used, "nothing is refreshed"
        assert list(ledger_of(silo).entries())[: len(entries)] == entries
    spend(silo, "new-label")
    assert ledger_of(silo).used() == pytest.approx(2 * used)
    assert sorted(path.name for path in (home / "silo").glob("*.db")) == ["ledger.db"]


def test_a_study_that_protects_somebody_else_is_refused_once_the_ledger_is_spent_from(home):
    silo = made(home, registry=None)
    spend(silo, "first")
    other = schema(home, "by person")
    other.write_text('person = "b"\nrows_per_person = 2\n' + other.read_text().replace('"b", ', ""))
    propose(silo, "persons", "--schema", other, "--model", "logistic")
    before = Path(silo.policy).read_bytes()
    with pytest.raises(
        BadInput, match="keeps a budget of rows, but the schema now protects persons"
    ):
        approve(compare(Path(silo.policy), home / "persons.toml"))
    assert Path(silo.policy).read_bytes() == before


def test_a_policy_keeps_every_line_that_its_officer_wrote():
    text = (
        '# mine\nsilo = "x"   # me\nstatistics = ["Grad"]\n\n[daemon]\n# where\nmodel = '
        '"mlp:4"\nlog = "a"\n\n[shuffle]\nmodel = 1\n'
    )
    table = tomllib.loads(text)
    changed = edited(
        text, table, {"statistics": ["Grad", "Gram"], "study": "s"}, {"model": 'a"b\\g<0>.py:f'}
    )
    assert tomllib.loads(changed) == table | {
        "statistics": ["Grad", "Gram"],
        "study": "s",
        "daemon": {"model": 'a"b\\g<0>.py:f', "log": "a"},
    }
    assert [line for line in text.splitlines() if "#" in line] == [
        line for line in changed.splitlines() if "#" in line
    ]
    broken = text.replace(
        '["Grad"]', '[\n  "Grad",\n]'
    )  # cannot be changed line by line, and is written anew
    assert tomllib.loads(edited(broken, table, {"statistics": ["Gram"]}, {}))["statistics"] == [
        "Gram"
    ]


def test_what_a_study_asks_for_beyond_the_policy_is_said_and_then_allowed(home):
    silo = made(home, registry=None)
    found = compare(
        Path(silo.policy), propose(silo, "second", "--model", "logistic", "--statistic", "Gram")
    )
    assert [c.words for c in found.changes if c.what == "may ask"] == [
        "Grad, ScaledGrad, Outcomes, Moments, GradDiff, LocalSteps, RiskCells -> "
        "Grad, ScaledGrad, Outcomes, Moments, GradDiff, LocalSteps, RiskCells, Gram"
    ]
    approve(found)
    assert "Gram" in Policy.load(silo.policy).statistics
    assert read_card(home / "silo/silo.json").statistics == Policy.load(silo.policy).statistics, (
        "who asks sees it on the card"
    )
    assert Policy.load(silo.policy).askers == (ASKER,)


def test_an_officers_word_that_the_file_was_checked_is_in_policy_and_card_and_goes_with_the_schema(
    home, capsys
):
    silo = made(home, registry=None)
    assert silodp("silo", "attest", silo.policy, "--by", "A. Officer", "--on", "2026-01-02") == 0
    assert (
        Policy.load(silo.policy).checked
        == read_card(home / "silo/silo.json").checked
        == "2026-01-02 by A. Officer"
    )
    approve(compare(Path(silo.policy), propose(silo, "model", "--model", "logistic")))
    assert read_card(home / "silo/silo.json").checked == "2026-01-02 by A. Officer"
    propose(silo, "columns", "--schema", schema(home, "other"), "--model", "logistic")
    approve(compare(Path(silo.policy), home / "columns.toml"))
    assert Policy.load(silo.policy).checked == read_card(home / "silo/silo.json").checked == "", (
        "it was of another schema"
    )
    assert silodp("silo", "attest", silo.policy, "--by", "A. Officer", "--on", "2999-01-01") == 2
    assert "it must be a day that has come" in capsys.readouterr().err
    write_data(home / "clinic.csv")
