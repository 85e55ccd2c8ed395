"""`silodp init` asks: every answer is checked, and what comes out is a whole schema; templates are
whole from the start.
"""

import builtins
import json
from pathlib import Path

import pandas as pd
import pytest

from silodp.host.schema import load_schema
from silodp.silo.data.tables import read_table

ANSWERS = [
    # two of these are refused, and asked for again
    "outcome",
    "readmitted",
    "guess",
    "binary",
    "no",
    "no,yes",
    "often",
    "12 %",
    "ignore",  # id
    "number",
    "zero",
    "0",
    "-1",
    "110",
    "",
    "category",
    "f,m,other",
    "",
    "boolean",
    "maybe",
    "false",
    "?",
    "gone.csv",
    "a.csv",
]


@pytest.fixture
def answers(monkeypatch):
    def give(*words):
        left = iter(words)

        def read(question):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)
        return left

    return give


def test_questions_end_in_a_schema_that_reads_the_file(silodp, answers, tmp_path):
    pd.DataFrame(
        {
            "id": [1, 2],
            "age": [40, "?"],
            "sex": ["f", "x"],
            "smoker": ["yes", ""],
            "readmitted": ["no", "yes"],
        }
    ).to_csv("a.csv", index=False)
    left = answers(*ANSWERS)
    code, out, err = silodp("init", "study", "--from", "a.csv", "--ask", "--model", "logistic")
    assert (code, err, list(left)) == (0, "", [])
    for said in (
        "Give one of id, age, sex, smoker, readmitted.",
        "Give one of binary",
        "Give 2 different words",
        "Give a number",
        "Give a number above 0.",
        "Give a share above 0 and below 1",
        "gone.csv does not exist",
    ):
        assert said in out
    assert "fill in" not in Path("study/schema.toml").read_text()
    schema = load_schema("study/schema.toml")
    assert schema.missing_codes == ("?",)
    assert schema.label.positive == 0.12
    assert read_table(tmp_path / "a.csv", schema).x.shape == (2, 1 + 4 + 1)
    assert 'silo = ["../a.csv"]' in Path("study/silodp.toml").read_text()
    assert "silodp silo check FILE --schema study/schema.toml" in out


@pytest.mark.parametrize(
    ("task", "words", "field"),
    [
        (
            "survival",
            ["event", "6,3", "6,12"],
            {"task": "survival", "time": "y", "event": "event", "edges": [6.0, 12.0]},
        ),
        ("regression", ["0", "30"], {"task": "regression", "column": "y", "range": [0.0, 30.0]}),
        ("count", ["40"], {"task": "count", "column": "y", "most": 40}),
        (
            "ordinal",
            ["a,b", "a,b,c"],
            {"task": "ordinal", "column": "y", "classes": ["a", "b", "c"]},
        ),
        (
            "multiclass",
            ["a,b,c"],
            {"task": "multiclass", "column": "y", "classes": ["a", "b", "c"]},
        ),
    ],
)
def test_every_task_can_be_answered(silodp, answers, task, words, field):
    event = ["event"] if task == "survival" else []
    answers(",".join(["y", "x", *event]), "y", task, *words, "number", "0", "1", "refuse", "", "")
    assert silodp("init", "study", "--ask")[0] == 0
    assert load_schema("study/schema.toml").label.table() == field


def test_an_answer_can_be_taken_back_and_the_rest_of_the_columns_ignored(silodp, answers):
    left = answers(
        *("<", "a,b,admission_date,d,y", "y", "binary", "no,yes", "<", "<", "multiclass", "u,v,w"),
        *("number", "0", "10", "", "<", "5", "boolean", "<", "category"),
        *("Female, female, F, Male, m, other", "yes", "own", "date", "rest", "", ""),
    )
    code, out, err = silodp("init", "study", "--ask")
    assert (code, err, list(left)) == (0, "", [])
    assert "This is the first question." in out
    assert "Dates are not supported. In each silo's file, replace the date by a number" in out
    schema = load_schema("study/schema.toml")
    assert schema.label.table() == {
        "task": "multiclass",
        "column": "y",
        "classes": ["u", "v", "w"],
    }
    assert [column.table() for column in schema.columns] == [
        {"type": "number", "range": [0.0, 10.0], "missing": 5.0, "indicator": False},
        {
            "type": "category",
            "categories": ["female", "Male", "other"],
            "aliases": {"Female": "female", "F": "female", "m": "Male"},
            "missing": "own",
        },
    ]
    assert schema.ignore == ("admission_date", "d")


def test_spellings_are_given_with_an_equals_sign_and_kept_apart_on_request(silodp, answers):
    answers(
        *("a,b,y", "y", "binary", "no,yes", "", "category", "w = weiblich = F, m", "refuse"),
        *("category", "A,a", "no", "refuse", "", ""),
    )
    assert silodp("init", "study", "--ask")[0] == 0
    first, second = load_schema("study/schema.toml").columns
    assert first.aliases == (("weiblich", "w"), ("F", "w"))
    assert (second.categories, second.aliases) == (("A", "a"), ())


def test_answers_that_end_too_early_write_nothing(silodp, answers):
    answers("a,b")
    code, _, err = silodp("init", "study", "--ask")
    assert (code, "use --yes for a draft" in err, Path("study").exists()) == (2, True, False)


def test_a_script_is_not_asked(silodp, answers):
    answers()
    assert silodp("init", "study", "--yes")[0] == 0
    assert "fill in" in Path("study/schema.toml").read_text()


@pytest.mark.parametrize("form", ["omop", "fhir"])
def test_a_template_is_whole(silodp, form):
    code, out, _ = silodp("init", "study", "--template", form, "--json")
    assert (code, json.loads(out)["draft"]) == (0, False)
    schema = load_schema("study/schema.toml")
    assert len(schema.columns) >= 11
    assert schema.task.kind == "binary"


def test_an_unknown_template_gets_a_sentence(silodp):
    assert "it must be one of omop, fhir" in silodp("init", "study", "--template", "i2b2")[2]
    assert "without --demo" in silodp("init", "study", "--template", "omop", "--demo")[2]
