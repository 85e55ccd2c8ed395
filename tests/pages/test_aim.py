"""A page's title says what is predicted from what, in the words of the schema."""

import pytest

from silodp.core.problem.schema import Schema
from silodp.pages.aim import aim
from silodp.pages.report import title
from silodp.pages.runs import Run

NUMBER = {"type": "number", "range": [0, 1]}


@pytest.mark.parametrize(
    ("label", "columns", "words"),
    [
        (
            {"task": "survival", "time": "years", "event": "death", "edges": [1, 5]},
            ["age", "sex", *"abcdef"],
            "Death within 5 years from age, sex and 6 more",
        ),
        (
            {"task": "binary", "column": "re_admitted", "classes": ["no", "yes"]},
            ["age"],
            "Re admitted from age",
        ),
        (
            {"task": "binary", "column": "status", "classes": ["alive", "dead"]},
            ["age", "blood_pressure", "c"],
            "Dead (status) from age, blood pressure and c",
        ),
        ({"task": "count", "column": "visits", "most": 9}, ["age", "b"], "Visits from age and b"),
    ],
)
def test_the_title_is_what_is_predicted_from_what(tmp_path, label, columns, words):
    schema = Schema.of({"columns": dict.fromkeys(columns, NUMBER), "label": label})
    about = {"schema_text": schema.text, "algorithm": "mb-sgd"}
    found = Run(tmp_path, "federation", "running", "", about)
    assert aim(found) == title(found) == words


def test_without_a_schema_the_title_is_the_algorithm_and_its_silos(tmp_path):
    found = Run(tmp_path, "federation", "running", "", {"algorithm": "spider"})
    assert (aim(found), title(found)) == ("", "SPIDER over 0 silos")
