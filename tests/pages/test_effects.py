"""A report draws the effect of each column, in its own unit, with a band of the privacy noise."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from silodp.core.problem.build import Words, build
from silodp.core.problem.reading import plain_text
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.host.extension import load
from silodp.host.model import open_model
from silodp.host.schema import schema_text
from silodp.pages import runs
from silodp.pages.effects import effects
from silodp.pages.report import report
from silodp.pages.style import STYLE
from silodp.server.folder import write_model
from silodp.server.order import Order
from silodp.simulation.source import Source
from silodp.simulation.training import train

COLUMNS = {
    "age": {"type": "number", "range": [20, 100]},
    "weight": {"type": "number", "range": [40, 160]},
    "smoker": {"type": "boolean"},
}
ILL = {"column": "ill", "task": "binary", "classes": ["no", "yes"]}


def folder_with(tmp_path: Path, schema: Schema, w: torch.Tensor) -> runs.Run:
    problem = build(Words("additive:5", schema), len(schema.features), load=load)
    write_model(tmp_path, problem, w, {"model": "additive:5", "schema": schema.text})
    return run_in(tmp_path)


def run_in(tmp_path: Path, **summary) -> runs.Run:
    about = {"model": "additive:5", "algorithm": "adam"}
    return runs.Run(tmp_path, "train", "finished", "", about, summary=summary)


def texts(page: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", page)


def test_each_number_column_has_a_curve_in_its_own_unit_and_all_have_one_scale(tmp_path):
    schema = Schema.of({"columns": COLUMNS, "label": ILL})
    w = torch.zeros(1, 2 * 4 + 1 + 1)
    w[0, 0], w[0, 8] = 2.0, -0.75  # a line for age, from -2 to 2; nothing for weight; and smokers
    (page,) = effects(folder_with(tmp_path, schema, w))
    assert re.findall(r"<figcaption><b>([^<]*)", page)[:2] == ["age", "weight"]
    said = texts(page)
    assert {"20", "100", "40", "160", "-2", "2"} <= set(said)
    assert said.count("log-odds of yes") == 4  # two sizes each
    lines = [
        re.findall(r"[ML]([\d.]+) ([\d.]+)", d)
        for d in re.findall(r'<path d="([^"]*)" class="curve', page)
    ]
    age, flat = ([float(y) for _, y in line] for line in lines[::2])
    assert age == sorted(age, reverse=True)
    assert age[0] - age[-1] > 100
    assert len(set(flat)) == 1
    assert "smoker: yes instead of no" in page
    assert "-1.5<" in page  # twice the weight, since no is -1 and yes is 1
    assert "There is no band" in page  # of this run's noise nothing is known
    assert "area" not in page


def test_the_band_is_the_noise_of_the_parameters_through_the_curves_coordinates(tmp_path):
    schema = Schema.of({"columns": COLUMNS, "label": ILL})
    w = torch.zeros(1, 10)
    w[0, 0] = 2.0
    w[0, 8] = 1.0
    folder_with(tmp_path, schema, w)
    (page,) = effects(run_in(tmp_path, spread=0.1, recalibration={"slope": 2.0}))
    # From no to yes the feature moves by 2: 1.96 x 0.1 x 2 x the slope of 2.
    assert "2.00 (1.22 to 2.78)" in page
    assert "Clear of the privacy noise: age, smoker." in page
    assert page.count("area f0") == 2 * 2
    (page,) = effects(run_in(tmp_path, spread=[0.1] * 8 + [0.0, 0.1]))
    assert "2.00 (2.00 to 2.00)" in page


def test_straight_lines_are_changes_from_the_lowest_to_the_highest_value(tmp_path):
    schema = Schema.of(
        {
            "columns": COLUMNS
            | {"ward": {"type": "category", "categories": ["a", "b"], "missing": "own"}},
            "label": ILL,
        }
    )
    problem = build(Words("logistic", schema), len(schema.features), load=load)
    w = torch.tensor([[0.5, -1.0, 0.0, 0.25, 1.0, 0.125, 9.0]])
    write_model(tmp_path, problem, w, {"model": "logistic", "schema": schema.text})
    (page,) = effects(run_in(tmp_path, spread=0.0))
    for words in (
        'age: 100 instead of 20</th><td class="number" data-of="effect">1.00 (',
        'weight: 160 instead of 40</th><td class="number" data-of="effect">-2.00 (',
        'ward: b instead of a</th><td class="number" data-of="effect">0.75 (',
        'ward: missing</th><td class="number" data-of="effect">-0.12 (',
    ):
        assert words in page, words
    assert "Clear of the privacy noise: age, weight, ward." in page


def test_on_a_phone_a_name_covers_the_lines_behind_it(tmp_path):
    schema = Schema.of({"columns": COLUMNS, "label": ILL})
    (page,) = effects(folder_with(tmp_path, schema, torch.ones(1, 10)))
    wide, narrow = re.findall(r"<svg.*?</svg>", page[page.index("Change in") :], re.DOTALL)
    assert 'class="name"' not in wide
    assert re.findall(r'class="name">([^<]*)', narrow) == ["smoker: yes instead of no"]
    assert narrow.rindex('class="axis"') < narrow.index('class="name"')
    assert ".name{paint-order:stroke;stroke:var(--paper)" in STYLE


def test_a_network_has_curves_with_bands_too(tmp_path):
    schema = Schema.of({"columns": COLUMNS, "label": ILL})
    problem = build(Words("mlp:4", schema), len(schema.features), load=load)
    about = {"model": "mlp:4", "schema": schema.text}
    write_model(tmp_path, problem, problem.initial([1]), about)
    (page,) = effects(run_in(tmp_path, spread=0.01))
    assert page.count("area f0") == 2 * 2
    assert "smoker: yes instead of no" in page
    assert "For this model it is approximate" in page


def test_a_number_that_is_predicted_is_drawn_in_its_unit(tmp_path):
    schema = Schema.of(
        {"columns": COLUMNS, "label": {"column": "days", "task": "regression", "range": [0, 60]}}
    )
    w = torch.zeros(1, 10)
    w[0, 0] = 1.0  # from -30 to 30 days
    (page,) = effects(folder_with(tmp_path, schema, w))
    assert {"-30", "30"} <= set(texts(page)) or {"-20", "20"} <= set(texts(page))


def test_without_a_model_there_is_nothing_to_show(tmp_path):
    assert effects(runs.Run(tmp_path, "train", "running", "", {"model": "additive:8"})) == []


def test_a_run_is_drawn_with_the_noise_of_its_plan(tmp_path):
    random = np.random.default_rng(0)
    (tmp_path / "s.toml").write_text(
        schema_text({"columns": {name: COLUMNS[name] for name in ("age", "smoker")}, "label": ILL})
    )
    for name, n in (("a", 90), ("b", 30)):
        rows = [
            f"{random.uniform(20, 100):.1f},{random.integers(0, 2)},{random.choice(['no', 'yes'])}"
            for _ in range(n)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,smoker,ill", *rows]) + "\n")
    source = Source(silos=(tmp_path / "a.csv", tmp_path / "b.csv"), schema=tmp_path / "s.toml")
    order = Order(
        algorithm="mb-sgd",
        model="additive:4",
        rounds=3,
        step=2.0,
        clip=0.5,
        weights="records",
        seed=1,
    )
    train(order, source, tmp_path / "run")
    run = runs.read(tmp_path / "run")
    page = report(run)
    assert 'id="effects"' in page
    assert "95 % of the draws of the privacy noise" in page
    multipliers = [run.rounds[0]["answered"][name]["noise_multiplier"] for name in "ab"]
    one = math.hypot(
        *(m * 2 * 0.5 / 120 for m in multipliers)
    )  # each silo's mean, by its share of the records
    assert run.summary["spread"] == pytest.approx(2.0 * math.sqrt(3) * one, rel=0.05)


def test_a_model_of_files_without_a_schema_is_read_back_as_it_was_trained(tmp_path):
    """Its features are standardised, and its curves reach to three deviations: by ranges of -1 to 1
    they would be others.
    """
    problem = build(Words("additive:5", Task.plain(2)), 2, load=load)
    w = problem.initial([4])
    scaling = {"scaling.mean": torch.tensor([1.0, -2.0]), "scaling.scale": torch.tensor([2.0, 5.0])}
    write_model(
        tmp_path,
        problem,
        w,
        {"model": "additive:5", "plain": plain_text(("a", "b"), ("0", "1"), "label")},
        scaling,
    )
    rows = torch.tensor([[5.0, 3.0], [-2.0, 9.0]], dtype=torch.float64)
    x = ((rows - scaling["scaling.mean"]) / scaling["scaling.scale"]).float()
    model = open_model(tmp_path)
    assert torch.allclose(
        model.reading(rows)[:, 1], problem.outputs(w, x)[0, :, 0].sigmoid(), atol=1e-6
    )
    (page,) = effects(run_in(tmp_path))
    assert {"-5", "5"} <= set(texts(page))  # 1 - 3 x 2 to 1 + 3 x 2
