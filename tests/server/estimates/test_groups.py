"""Figures of groups: which columns have some, and that intervals hold what they say."""

import math

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.core.quality import interval
from silodp.server.estimates.groups import groups_of
from silodp.server.estimates.scoring import ratio, told

TABLE = {
    "columns": {
        "age": {"type": "number", "range": [0, 100], "missing": 50, "indicator": True},
        "sex": {"type": "category", "categories": ["female", "male", "other"], "missing": "own"},
        "one": {"type": "category", "categories": ["only"]},
        "smoker": {"type": "boolean", "missing": False, "indicator": True},
        "alone": {"type": "boolean", "missing": True},
    },
    "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
}
SCHEMA = Schema.of(TABLE)


@pytest.mark.parametrize("by", ["sex", "smoker", "alone"])
def test_groups_are_at_the_features_that_the_schema_makes_of_their_column(by):
    found = groups_of(SCHEMA, by)
    names = SCHEMA.features[found.first : found.first + found.features + found.indicator]
    wanted = {
        "sex": ("sex=female", "sex=male", "sex=other"),
        "smoker": ("smoker", "smoker missing"),
        "alone": ("alone",),
    }
    assert names == wanted[by]
    assert found.names == (("female", "male", "other") if by == "sex" else ("no", "yes"))
    assert ("counts as yes" if by == "alone" else "in no group") in found.note


@pytest.mark.parametrize(
    ("schema", "by", "about", "sentence"),
    [
        (
            SCHEMA,
            "age",
            {},
            (
                r"--by is 'age'; it must be a category or boolean column of the schema: sex, "
                r"smoker, alone$"
            ),
        ),
        (SCHEMA, "one", {}, "sex, smoker, alone"),
        (SCHEMA, "ill", {}, "sex, smoker, alone"),
        (
            Schema.of(TABLE | {"columns": {"age": TABLE["columns"]["age"]}}),
            "age",
            {},
            "it has none",
        ),
        (None, "sex", {}, "no schema"),
        (SCHEMA, "sex", {"feature_map": "own.py:f"}, "own.py:f"),
        (
            Schema.of(TABLE | {"label": {"column": "ill", "task": "count", "most": 9}}),
            "sex",
            {},
            "a count has none",
        ),
    ],
)
def test_what_cannot_be_asked_by_is_said_in_a_sentence(schema, by, about, sentence):
    with pytest.raises(BadInput, match=sentence):
        groups_of(schema, by, **about)


@pytest.mark.parametrize(
    ("records", "accuracy", "noise"),
    [(400, 0.8, 0.005), (150, 0.97, 0.002), (60, 0.6, 0.005), (2000, 0.5, 0.03)],
)
def test_an_interval_holds_the_share_in_the_population_with_95_per_cent(records, accuracy, noise):
    """2,000 draws of records and noise: with 95 per cent a count is within 0.02 (4 standard errors)
    of that; too few are too noisy.
    """
    random, n, missed, drowned = np.random.default_rng(7), 2000, 0, 0
    for _ in range(2000):
        own = random.binomial(n, records / n) if records < n else n
        right = random.binomial(own, accuracy)
        found = told(
            ratio(
                right / n + noise * random.normal(),
                (own - right) / n + noise * random.normal(),
                noise,
                noise,
                n,
            )
        )
        if found["too_noisy"]:
            drowned += 1
            continue
        low, high = interval("accuracy", found)
        missed += not low <= accuracy <= high
    assert missed / (2000 - drowned or 1) <= 0.07
    assert drowned < 2000


def test_a_group_that_is_not_clear_of_its_noise_is_too_noisy():
    found = ratio(0.03, 0.02, 0.01, 0.01, 500)
    assert found.too_noisy
    assert math.isnan(found.value)
    assert not ratio(0.3, 0.2, 0.01, 0.01, 500).too_noisy
