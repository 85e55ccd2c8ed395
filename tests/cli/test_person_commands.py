"""A person as the unit in the commands: a profile, a run through a shuffler and predictions, each
by a schema that names a person.
"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from silodp.cli.app import app

SCHEMA = """
person = "patient"
rows_per_person = 3

[columns.age]
type = "number"
range = [0, 100]

[columns.smokes]
type = "boolean"

[label]
column = "ill"
task = "binary"
classes = ["no", "yes"]
"""
PEOPLE = (40, 30)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of people with one to three rows each."""
    folder, random = tmp_path_factory.mktemp("people"), np.random.default_rng(5)
    (folder / "schema.toml").write_text(SCHEMA)
    for name, people in zip("ab", PEOPLE, strict=True):
        rows = [
            f"{name}{p},{random.uniform(20, 90):.0f},{'yes' if p % 3 else 'no'},{'yes' if p % 2 else 'no'}"  # noqa: E501
            for p in range(people)
            for _ in range(1 + p % 3)
        ]
        (folder / f"{name}.csv").write_text("patient,age,smokes,ill\n" + "\n".join(rows) + "\n")
    return folder


def words(files):
    return [
        "--schema",
        str(files / "schema.toml"),
        "--silo",
        str(files / "a.csv"),
        "--silo",
        str(files / "b.csv"),
    ]


def silodp(*given):
    result = CliRunner().invoke(app, [*map(str, given), "--json"], catch_exceptions=False)
    return json.loads(result.stdout)


def test_a_profile_by_a_schema_counts_people(files):
    found = silodp("stats", "profile", *words(files), "--epsilon", 400, "--seed", 1)
    assert [row["feature"] for row in found["features"]] == ["age", "smokes"]
    assert [row["class"] for row in found["classes"]] == ["no", "yes"]
    assert sum(row["count"] for row in found["classes"]) == pytest.approx(sum(PEOPLE), abs=3), (
        "persons, not rows"
    )


@pytest.fixture(scope="module")
def shuffled(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    order = (
        "--trust",
        "shuffle",
        "--algorithm",
        "mb-sgd",
        "--model",
        "logistic",
        "--rounds",
        2,
        "--epsilon",
        3,
        "--seed",
        2,
    )
    return folder, silodp("train", *words(files), *order, "--out", folder)


def test_a_run_through_a_shuffler_is_by_person(shuffled):
    """A total counts on the noise of persons: were rows counted, there would be more of it to count
    on than there is.
    """
    folder, summary = shuffled
    kept = json.loads((folder / "run.json").read_text())
    assert [silo["records"] for silo in kept["silos"]] == list(PEOPLE)
    assert {silo["delta"] for silo in kept["silos"]} == {1 / max(PEOPLE) ** 2}
    assert summary["unit"].startswith("Epsilon is for a person")
    assert all(silo["spent_epsilon"] <= 3 for silo in summary["silos"])


def test_rows_are_predicted_one_by_one_by_a_schema_of_people(shuffled, tmp_path):
    """Whose a row is has no part in what is predicted for it, and need not be said."""
    for header, first in (("patient,age,smokes", "z1,"), ("age,smokes", "")):
        (tmp_path / "new.csv").write_text(
            f"{header}\n{first}30,no\n{first}80,yes\n{first.replace('1', '2')}30,no\n"
        )
        found = silodp("predict", shuffled[0], tmp_path / "new.csv")
        risks = [row["risk_yes"] for row in found["rows"]]
        assert len(risks) == 3
        assert risks[0] == risks[2] != risks[1]
