"""The additive model: curves over public ranges, whose coordinates are fixed before any record is
seen.
"""

import hashlib

import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.problem.build import Words, build
from silodp.core.problem.losses import logistic
from silodp.core.problem.models import Shapes, additive, bends, model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.engine.clipping import ENGINES, IN_TORCH, choose, clipped_sum, task
from silodp.engine.ghost import Ghost
from silodp.engine.records import Records
from silodp.host.extension import load

SCHEMA = Schema.of(
    {
        "columns": {
            "age": {"type": "number", "range": [0, 100], "missing": 50, "indicator": True},
            "sex": {"type": "category", "categories": ["f", "m"]},
            "smoker": {"type": "boolean"},
            "pressure": {"type": "number", "range": [60, 220]},
        },
        "label": {"column": "ill", "task": "binary", "classes": ["no", "yes"]},
    }
)


def test_every_piecewise_linear_curve_can_be_drawn_and_the_first_coordinate_is_the_line():
    mix = torch.tensor(bends(8))
    assert torch.equal(mix[:, 0], torch.linspace(-1, 1, 8).round(decimals=5))
    assert torch.linalg.matrix_rank(torch.cat([mix, torch.ones(8, 1)], 1)) == 8


def test_the_coordinates_are_orthogonal_over_the_range_and_rougher_ones_are_smaller():
    shapes = Shapes(1, (0,), 8, 1.0)
    values = shapes(torch.linspace(-1, 1, 20_001)[:, None]).double()
    covariance = values.T @ values / len(values)
    assert (covariance - covariance.diag().diag()).abs().max() < 1e-3
    assert values.mean(0).abs().max() < 1e-3
    assert torch.allclose(
        covariance.diag()[:2], torch.tensor([1 / 3, 1 / 3], dtype=torch.float64), atol=1e-3
    )
    assert (covariance.diag()[2:] < 0.8 * covariance.diag()[1:-1]).all()


def test_a_curve_goes_through_its_values_at_the_knots_and_stays_constant_beyond_the_reach():
    shapes = Shapes(2, (1,), 5, 3.0)
    weight = torch.randn(1, shapes.width, generator=torch.Generator().manual_seed(1))
    knots = torch.tensor([-9.0, -3.0, -1.5, 0.0, 1.5, 3.0, 50.0])
    made = shapes(torch.stack([torch.zeros(7), knots], 1)) @ weight[0]
    curve = shapes.curves(weight)[0, 0]
    assert torch.allclose(made, curve[[0, 0, 1, 2, 3, 4, 4]], atol=1e-6)


def test_by_the_schema_numbers_have_curves_and_booleans_categories_and_indicators_weights():
    model = build(Words("additive:6", SCHEMA), 6, load=load).model
    assert SCHEMA.features[model[0].numbers[0]] == "age"
    assert [SCHEMA.features[i] for i in model[0].others] == [
        "age missing",
        "sex=f",
        "sex=m",
        "smoker",
    ]
    assert model[1].in_features == 2 * 5 + 4
    assert model[1].out_features == 1
    x = torch.zeros(1, 6)
    x[0, 4] = 1.0
    assert torch.equal(model[0](x)[0, -4:], torch.tensor([0.0, 0.0, 0.0, 1.0]))


def test_without_a_schema_every_feature_is_a_number_and_taken_as_standardised():
    model, loss = model_by_name("additive:4", 3, 2)
    assert (model[0].numbers, model[0].reach, loss) == ((0, 1, 2), 3.0, logistic)
    assert additive("additive:4:1", 3, None).reach == 1.0
    assert model_by_name("additive:4", 3, Task("survival", bins=5))[0][-1].out_features == 5


@pytest.mark.parametrize(
    "word",
    [
        "additive",
        "additive:2",
        "additive:x",
        "additive:8:0",
        "additive:8:1:1",
        "additive:8:nan",
        "additive:65",
    ],
)
def test_a_word_that_names_no_basis_is_refused_in_a_sentence(word):
    with pytest.raises(BadInput, match="additive:8"):
        model_by_name(word, 3, 2)


def test_images_have_no_curves():
    with pytest.raises(BadInput, match="for columns"):
        model_by_name("additive:8", 16, 2, (1, 4, 4))


def test_what_a_silo_approves_covers_knots_reach_columns_and_every_number_of_the_basis():
    def approved(*options) -> str:
        shapes = Shapes(*options)
        return hashlib.sha256(
            Problem(nn.Sequential(shapes, nn.Linear(shapes.width, 1)), logistic)
            .definition()
            .encode()
        ).hexdigest()

    texts = [
        approved(3, (0, 1), 6, 1.0),
        approved(3, (0, 2), 6, 1.0),
        approved(3, (0, 1), 7, 1.0),
        approved(3, (0, 1), 6, 2.0),
    ]
    assert len(set(texts)) == 4
    other = Shapes(3, (0, 1), 6, 1.0)
    other.mix[0, 0] += 1e-5
    changed = Problem(nn.Sequential(other, nn.Linear(other.width, 1)), logistic).definition()
    assert hashlib.sha256(changed.encode()).hexdigest() not in texts


@pytest.mark.parametrize("memory", [2**28, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fast_engines_sum_what_the_engine_for_every_model_does(memory, dtype):
    problem = build(Words("additive:6", SCHEMA), 6, load=load)
    g = torch.Generator().manual_seed(3)
    x, y = torch.rand(2, 40, 6, generator=g) * 2 - 1, torch.randint(0, 2, (2, 40), generator=g)
    x[1, 39] = torch.nan
    weight = torch.ones(2, 40)
    weight[1, 39] = 0
    w = problem.initial([1, 2, 3]).to(dtype)
    wanted = clipped_sum(problem, w, x, y, weight, 0.4, engines=(Records(),), memory=2000)
    for engines in (ENGINES, IN_TORCH):
        found = clipped_sum(problem, w, x, y, weight, 0.4, engines=engines, memory=memory)
        assert torch.allclose(found, wanted, atol=1e-5)
    assert wanted.abs().max() > 0.1


def test_after_its_basis_the_model_is_a_chain_for_the_fastest_engine():
    problem = build(Words("additive:6", SCHEMA), 6, load=load)
    x, y = torch.zeros(1, 5, 6), torch.zeros(1, 5, dtype=torch.long)
    wanted = task(problem, problem.initial([0]), x, y, torch.ones(1, 5), 1.0)
    assert wanted.x.shape == (1, 5, 14)
    assert isinstance(choose(wanted, IN_TORCH), Ghost)
    problem.model[0].register_forward_hook(lambda *_: None)
    hooked = task(problem, problem.initial([0]), x, y, torch.ones(1, 5), 1.0)
    assert isinstance(choose(hooked, IN_TORCH), Records)
