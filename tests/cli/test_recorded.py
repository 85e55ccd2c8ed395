"""`silodp stats ... --record`: every answer with its question and price, in report and evidence."""

import json
import math
import shlex
import zipfile

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from silodp.cli import groups
from silodp.cli.app import app
from silodp.cli.recorded import Recorder
from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import added, gdp_epsilon
from silodp.pages.statistics import NAMES, spent

COLUMNS = """
[columns.age]
type = "number"
range = [0, 110]

[columns.treated]
type = "boolean"
missing = false

[label]
"""
DIED = 'column = "died"\ntask = "binary"\nclasses = ["no", "yes"]\n'
TIME = 'time = "months"\nevent = "died"\ntask = "survival"\nedges = [6, 12, 24, 36]\n'
SCHEMAS = {"died": f'ignore = ["months"]\n{COLUMNS}{DIED}', "time": COLUMNS + TIME}
COMMANDS = {
    "profile": ("died", "age"),
    "table1 --by treated": ("died", "age, mean (SD)"),
    "quantiles --columns age": ("died", "age, median [IQR]"),
    "estimate": ("died", "odds ratio"),
    "synthesise --rows 50": ("died", "synthetic shares"),
    "survival": ("time", "Share without the event"),
    "logrank --by treated": ("time", "expected if alike"),
}
"""Each command with the label that it is for, and words that its answer has in a report."""
EPSILON = 3.0


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder with the answers to all commands, beside the files of two silos."""
    folder = tmp_path_factory.mktemp("study")
    for name, schema in SCHEMAS.items():
        (folder / f"{name}.toml").write_text(schema)
    for name, n in {"north": 700, "south": 500}.items():
        random = np.random.default_rng(n)
        months = random.exponential(30, n)
        frame = pd.DataFrame(
            {
                "age": random.normal(60, 12, n).round(),
                "treated": random.choice(["yes", "no"], n),
                "months": months.clip(0, 48).round(1),
                "died": np.where(months < 48, "yes", "no"),
            }
        )
        frame.to_csv(folder / f"{name}.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command, (label, _) in COMMANDS.items():
            ask(command, label)
    return folder


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False).stdout


def ask(command, label, *more):
    """Ask in the study's folder, and record the answer."""
    schema = ("--schema", f"{label}.toml")
    silos = ("--silo", "north.csv", "--silo", "south.csv")
    price = ("--epsilon", EPSILON, "--delta", "1e-6")
    return run(
        "stats", *shlex.split(command), *schema, *silos, *price, "--record", "answers", *more
    )


def lines_of(study):
    text = (study / "answers/statistics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_command_of_stats_can_be_recorded_and_has_a_name_in_reports():
    assert set(groups.stats.commands) == set(NAMES)
    assert {command.split()[0] for command in COMMANDS} == set(NAMES)


def test_a_line_has_the_question_the_price_and_the_answer(study):
    lines = lines_of(study)
    assert [line["command"] for line in lines] == [command.split()[0] for command in COMMANDS]
    for line in lines:
        answer = line["answer"]
        assert [silo["name"] for silo in answer["silos"]] == ["north", "south"]
        squares = dict.fromkeys(("north", "south"), 0.0)
        for release in answer["releases"]:
            assert release["fields"]
            for name, multiplier in release["noise_multiplier"].items():
                squares[name] += multiplier**-2
        for silo in answer["silos"]:
            assert silo["spent_epsilon"] == pytest.approx(EPSILON, rel=1e-6)
            # The price follows from the questions in the record.
            priced = gdp_epsilon(math.sqrt(squares[silo["name"]]), silo["delta"])
            assert priced == pytest.approx(EPSILON, rel=1e-6)


def test_a_report_shows_every_answer_and_the_price_of_all_together(study, monkeypatch):
    monkeypatch.chdir(study)
    run("report", "answers")
    page = (study / "answers/report.html").read_text()
    for _, words in COMMANDS.values():
        assert words in page
    for statistic in ("Marginals", "Regression", "GroupClasses", "ClassCounts", "Moments"):
        assert f">{statistic}<" in page
    together = added([(EPSILON, 1e-6)] * len(COMMANDS), gaussian=True)
    assert spent(lines_of(study)) == {
        name: (len(COMMANDS), pytest.approx(together[0], rel=1e-5), 1e-6)
        for name in ("north", "south")
    }
    assert f"{together[0]:.3f}"[:4] in page
    assert "one process read the records of all silos" in page
    assert "Traceback" not in page


def test_evidence_has_every_answer_and_is_verified_and_names_no_folder(study, monkeypatch):
    monkeypatch.chdir(study)
    run("export", "evidence", "answers", "--out", "answers.zip")
    assert "unchanged since it was signed" in run("export", "evidence", "verify", "answers.zip")
    with zipfile.ZipFile("answers.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert json.loads(files["statistics.json"]) == lines_of(study)
    silos = json.loads(files["spends.json"])["silos"]
    assert [(silo["name"], silo["answers"]) for silo in silos] == [("north", 7), ("south", 7)]
    assert not [name for name, text in files.items() if str(study) in text]


def test_a_training_is_reported_with_the_answers_beside_it(study, tmp_path, monkeypatch):
    monkeypatch.chdir(study)
    words = ("--algorithm", "mb-sgd", "--rounds", 2, "--epsilon", 1, "--seed", 1)
    run("train", "--data", "wbcd", *words, "--out", tmp_path / "run")
    run("report", tmp_path / "run", "--statistics", "answers")
    page = (tmp_path / "run/report.html").read_text()
    assert "Other answers of the silos" in page
    assert "This price is in addition to that of the training" in page
    assert "Share without the event" in page
    archive = ("export", "evidence", tmp_path / "run", "--key", tmp_path / "key")
    run(*archive, "--statistics", "answers", "--out", tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as files:
        assert json.loads(files.read("statistics.json")) == lines_of(study)
    with pytest.raises(BadInput, match=r"contains no answers of `silodp stats`"):
        run("report", tmp_path / "run", "--statistics", tmp_path)
    with pytest.raises(BadInput, match="contains a run of another command"):
        ask("profile", "died", "--record", tmp_path / "run")


def test_a_seed_is_shown_as_a_danger_and_totals_as_what_the_server_sees(study, monkeypatch):
    monkeypatch.chdir(study)
    ask("profile", "died", "--record", "seeded", "--seed", 5, "--trust", "masks")
    run("report", "seeded")
    page = (study / "seeded/report.html").read_text()
    assert "The seed was fixed (5)" in page
    assert "against a server that sees totals" in page


def test_the_same_answer_is_recorded_once(tmp_path):
    """A question that was asked again of gates gets the stored answer, at no further price."""
    answer = {"silos": [{"name": "a", "epsilon": 1.0, "delta": 1e-6}], "records": 3, "value": 0.1}
    for value in (0.1, 0.1, 0.2):
        recorder = Recorder.into(tmp_path, "table1", by="ward", columns=None)
        recorder.write(answer | {"value": value, "out": "/a/path"}, quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "statistics.jsonl").read_text().splitlines()]
    assert [line["answer"]["value"] for line in lines] == [0.1, 0.2]
    assert lines[0]["asked"] == {"by": "ward"}
    assert "out" not in lines[0]["answer"]
