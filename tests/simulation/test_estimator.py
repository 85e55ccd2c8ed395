"""The scikit-learn face: it keeps scikit-learn's own rules, and trains by the order and the code of
`silodp train`.
"""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import silodp
from silodp.core.errors import BadInput
from silodp.host.model import open_model
from silodp.silo.data import demo
from silodp.simulation import frames as memory

EXPECTED: dict[str, str] = {}
"""Checks of scikit-learn that private estimators are known to fail, with the reason: none, at a
budget that leaves the checks their scores.
"""


@pytest.mark.parametrize("kind", [silodp.Classifier, silodp.Regressor])
def test_scikit_learn_finds_nothing_to_complain_of(kind):
    found = check_estimator(
        kind(epsilon=1000, delta=1e-5, algorithm="mb-sgd", random_state=0),
        expected_failed_checks=EXPECTED,
        on_skip=None,
    )
    assert {check["status"] for check in found} <= {"passed", "skipped"}
    assert [check["check_name"] for check in found if check["status"] == "skipped"] in (
        [],
        ["check_array_api_input"],
    )


def clinics(n=300, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(3):
        x = rng.uniform(0, 10, (n, 2))
        made.append(
            pd.DataFrame(
                {
                    "a": x[:, 0],
                    "b": x[:, 1],
                    "sick": np.where(x[:, 0] + rng.normal(0, 1, n) > 5, "yes", "no"),
                }
            )
        )
    return made


RANGES = {"a": (0, 10), "b": (0, 10)}


def test_a_list_of_frames_is_a_list_of_silos_each_with_its_own_spend():
    made = silodp.Classifier(
        epsilon={"silo-0": 2.0, "silo-1": 1.0, "silo-2": 2.0},
        ranges=RANGES,
        label="sick",
        random_state=1,
    ).fit(clinics())
    assert {name: round(epsilon, 6) for name, (epsilon, _) in made.spent_.items()} == {
        "silo-0": 2,
        "silo-1": 1,
        "silo-2": 2,
    }
    test = pd.concat(clinics(seed=9))
    assert made.score(test, test["sick"]) > 0.8
    assert list(made.classes_) == ["no", "yes"]
    assert np.allclose(made.predict_proba(test).sum(1), 1)


def test_rows_with_a_silo_each_are_the_same_training_as_frames():
    whole = pd.concat(clinics(), ignore_index=True)
    silo = np.repeat(["silo-0", "silo-1", "silo-2"], 300)
    settings = {"epsilon": 2, "algorithm": "mb-sgd", "random_state": 1, "target": ["no", "yes"]}
    one = silodp.Classifier(**settings, label="sick").fit(clinics())
    other = silodp.Classifier(**settings).fit(whole[["a", "b"]], whole["sick"], silo=silo)
    assert np.array_equal(
        one.predict_proba(whole[["a", "b"]]), other.predict_proba(whole[["a", "b"]])
    )


def test_it_is_the_very_model_that_the_command_trains(silodp, tmp_path):
    import silodp as package

    for k, frame in enumerate(clinics()):
        frame.to_csv(tmp_path / f"silo-{k}.csv", index=False)
    words = [word for k in range(3) for word in ("--silo", f"silo-{k}.csv")]
    order = (
        "--label",
        "sick",
        "--classes",
        "no,yes",
        "--model",
        "logistic",
        "--epsilon",
        2,
        "--algorithm",
        "mb-sgd",
        "--rounds",
        6,
        "--seed",
        5,
    )
    code, _, err = silodp("train", *words, *order, "--out", "run", "--json")
    assert code == 0, err
    read = [pd.read_csv(tmp_path / f"silo-{k}.csv") for k in range(3)]
    made = package.Classifier(
        epsilon=2, algorithm="mb-sgd", rounds=6, label="sick", random_state=5
    ).fit(read)
    for one, other in zip(
        open_model(tmp_path / "run").reading.state_dict().values(),
        made.trained_.model.reading.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_it_can_be_cloned_put_into_a_pipeline_and_cross_validated():
    whole = pd.concat(clinics(), ignore_index=True)
    made = make_pipeline(
        FunctionTransformer(lambda x: x / 10),
        silodp.Classifier(
            2, ranges=[(0, 1), (0, 1)], algorithm="mb-sgd", rounds=5, step=2, random_state=0
        ),
    )
    scores = cross_val_score(clone(made), whole[["a", "b"]].to_numpy(), whole["sick"], cv=2)
    assert scores.min() > 0.8


def test_without_ranges_scaling_is_learnt_within_the_budget():
    fitted = [
        silodp.Classifier(
            2, label="sick", ranges=ranges, algorithm="mb-sgd", rounds=5, random_state=0
        ).fit(clinics())
        for ranges in (None, RANGES)
    ]
    learnt, public = (
        set(json.dumps(made.trained_.model.reading.mean.tolist()).strip("[]").split(", "))
        for made in fitted
    )
    assert public == {"0.0"}
    assert "0.0" not in learnt
    assert all(round(epsilon, 6) == 2 for made in fitted for epsilon, _ in made.spent_.values())


def test_a_number_is_predicted_in_its_own_unit():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (900, 1))
    y = 100 + 10 * x[:, 0] + rng.normal(0, 2, 900)
    made = silodp.Regressor(
        30, ranges=[(0, 10)], target=(50, 250), algorithm="mb-sgd", rounds=20, random_state=0
    ).fit(x, y, silo=np.arange(900) % 3)
    assert made.score(x, y) > 0.8


def test_a_schema_reads_frames_with_texts_and_holes(tmp_path):
    (tmp_path / "schema.toml").write_text(demo.SCHEMA)
    for name in ("north", "south"):
        (tmp_path / f"{name}.csv").write_text(demo.csv_text(name, 0))
    read = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in ("north", "south")}
    settings = {"model": "logistic", "algorithm": "mb-sgd", "rounds": 5, "step": 2}
    made = silodp.train(
        read, schema=tmp_path / "schema.toml", epsilon=2, out=tmp_path / "run", seed=3, **settings
    )
    table = made.predict(read["south"].drop(columns="readmitted"))
    assert list(table.columns) == ["risk_no", "risk_yes", "predicted"]
    assert (tmp_path / "run" / "summary.json").exists()
    fitted = silodp.Classifier(2, schema=tmp_path / "schema.toml", random_state=3, **settings).fit(
        read
    )
    assert np.array_equal(fitted.predict_proba(read["south"]), table[["risk_no", "risk_yes"]])
    assert list(fitted.predict(read["south"])) == list(table["predicted"])


def test_what_is_evaluated_in_memory_is_what_the_command_evaluates_at_the_same_price(
    silodp, tmp_path
):
    import silodp as package

    (tmp_path / "schema.toml").write_text(demo.SCHEMA)
    read = {
        name: frame for name, frame in package.hospitals().items() if name in ("north", "south")
    }
    for name in read:
        (tmp_path / f"{name}.csv").write_text(demo.csv_text(name))
    order = {
        "epsilon": 2,
        "model": "logistic",
        "algorithm": "mb-sgd",
        "rounds": 5,
        "step": 2,
        "seed": 3,
    }
    words = [str(word) for name, value in order.items() for word in (f"--{name}", value)]
    files = ("--schema", "schema.toml", "--silo", "north.csv", "--silo", "south.csv")
    assert silodp("train", *files, *words, "--held-out", 0.2, "--out", "run")[0] == 0
    answer = json.loads(silodp("evaluate", "run", "--epsilon", 2, "--seed", 4, "--json")[1])
    made = package.train(read, schema=tmp_path / "schema.toml", held_out=0.2, **order)
    found = made.evaluate(2, seed=4)
    figures = answer["scores"][0]["figures"]
    assert list(found.index) == list(figures)
    for name, row in found.iterrows():
        assert row["too_noisy"] == bool(figures[name]["too_noisy"])
        assert (
            row["too_noisy"] or row["low"] <= row["value"] == figures[name]["value"] <= row["high"]
        )
    assert made.spent["in_all"].tolist() == [both["epsilon"] for both in answer["in_all"]]
    assert (made.spent["in_all"] > made.spent["training"]).all()
    once = made.spent["in_all"]
    made.evaluate(1)
    assert (made.spent["in_all"] > once).all(), "a second look is paid for, too"


def test_what_is_left_open_is_chosen_and_said_and_a_folder_that_nobody_asked_for_goes():
    made = silodp.train(
        clinics(60), label="sick", classes=["no", "yes"], ranges=RANGES, epsilon=1, seed=0
    )
    assert made.chosen[0].startswith("Chosen from sizes, columns and budgets alone")
    assert made.folder is None
    place = made.model.path.parent
    assert made.spent["in_all"].tolist() == made.spent["training"].tolist()
    with pytest.raises(BadInput, match="held nothing out"):
        made.evaluate(1)
    shown = clinics(60)[0].iloc[5:9]
    assert list(made.predict(shown).index) == [5, 6, 7, 8]
    assert place.exists()
    del made
    assert not place.parent.exists()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda f: silodp.train(f, label="ill"), "no column 'ill'"),
        (lambda f: silodp.train(f, label="sick"), "row 1: the label is not one of the classes"),
        (
            lambda f: silodp.train(
                [f[0], f[1].rename(columns={"a": "c"})], label="sick", classes=["no", "yes"]
            ),
            "other columns",
        ),
        (lambda f: silodp.train(f[0]), "a list of pandas frames"),
        (
            lambda f: silodp.train(f, label="sick", classes=["no", "yes"], epsilom=1),
            "'epsilom' is unknown",
        ),
        (
            lambda f: silodp.train(f, label="sick", classes=["no", "yes"], ranges={"a": (0, 1)}),
            "ranges has no 'b'",
        ),
        (
            lambda f: silodp.train([f[0].assign(a="x")], label="sick", classes=["no", "yes"]),
            "columns that are not numbers: 'a'; give schema=",
        ),
        (
            lambda f: silodp.Classifier(label="sick").fit([f[0].assign(a="x"), f[1]]),
            "X has columns that are not numbers: 'a'; give schema=",
        ),
        (lambda f: silodp.Classifier(label="sick").fit(f, [1]), "leave out y and silo"),
        (lambda f: silodp.Classifier().fit(f[0][["a", "b"]], ["no"] * 300), "one class only"),
        (
            lambda f: silodp.Classifier().fit(f[0][["a", "b"]], f[0]["sick"], silo=[1]),
            "one name for each of the 300 rows",
        ),
        (
            lambda f: silodp.Regressor(target=(3, 1)).fit(f[0][["a", "b"]], [1.0] * 300),
            "low < high",
        ),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(BadInput, match=sentence):
        call(clinics())


def test_a_spend_that_is_not_the_orders_would_be_seen(monkeypatch):
    """The estimator's budget is what reaches the Order: were it lost on the way, the spend would be
    the default's.
    """
    true = memory.order_of
    monkeypatch.setattr(
        memory,
        "order_of",
        lambda settings: true(
            {name: value for name, value in settings.items() if name != "epsilon"}
        ),
    )
    made = silodp.Classifier(0.5, label="sick", algorithm="mb-sgd", rounds=5, random_state=0).fit(
        clinics()
    )
    assert {round(epsilon, 6) for epsilon, _ in made.spent_.values()} == {3.0}
