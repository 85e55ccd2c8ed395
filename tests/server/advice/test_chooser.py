"""The advisor: a function of public facts, at the noise of the real plan, that leaves what a user
says as it is.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.build import Words, build
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.core.weights import Weights
from silodp.host.extension import load
from silodp.server.advice import Facts, choose, kinds_of
from silodp.server.advice.candidates import Batch, Effort
from silodp.server.advice.chooser import Search
from silodp.server.advice.pool import Pool, noise_of
from silodp.server.advice.trusts import compared
from silodp.server.advice.words import lines, settings_file
from silodp.server.advice.worlds import WORLDS, draw
from silodp.server.algorithms import find
from silodp.server.federation import Everyone
from silodp.server.order import AUTO, USUAL, Order, targets
from silodp.server.prepare import prepare
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect

CLINICS = (303, 261, 46, 130)
KINDS = ("number",) * 5 + ("boolean",) * 3 + ("category",) * 5
QUICK = Effort(math.inf, (0, 1), 200, 400, (3, 12), (0.5,), (0.3, 3.0), 2)
"""Two worlds, eight candidates."""


def facts(counts=CLINICS, kinds=KINDS, task=None, **more):
    return Facts(
        tuple(f"s{i}" for i in range(len(counts))), counts, kinds, task or Task.plain(2), **more
    )


@pytest.mark.parametrize("weights", ["equal", "records", "precision"])
def test_the_pool_has_the_noise_of_the_weighted_mean_over_silos(weights):
    """What a federation of real gates adds to a mean has the std that the advisor simulates."""
    counts, names = (100, 400, 900), ("a", "b", "c")
    order = Order("mb-sgd", rounds=4, weights=weights, epsilon=("2", "a=1"))
    made = prepare(order, names, counts)
    problem = build(Words("logistic", Task.plain(2)), 400, load=load)
    silos = Records.of([(np.zeros((n, 400)), np.zeros(n, int)) for n in counts], names)
    ledger = MemoryLedger(made.plan.rule, made.plan.budgets.tolist(), counts)
    fed = connect("isrl", problem, silos, ledger, [7], Everyone(3), Weights(weights, counts))
    seen = torch.cat(
        list(
            find("mb-sgd").run(
                fed, problem, torch.zeros(1, problem.dim), rounds=4, step=1.0, **made.mechanisms
            )
        )
    )
    moves = torch.diff(seen, dim=0, prepend=torch.zeros(1, problem.dim))[
        :, :400
    ]  # weights of zero features: noise alone
    assert float(moves.std()) == pytest.approx(
        noise_of(made, Weights(weights, counts))["minibatch"], rel=4 / math.sqrt(2 * moves.numel())
    )


def test_the_pool_answers_as_a_silo_would_but_for_the_noise():
    sample = draw(WORLDS[0], KINDS, Task.plain(2), 200, 10, 1)
    problem = build(Words("logistic", Task.plain(2)), len(KINDS), load=load)
    w, clip = problem.initial([1, 2]), torch.tensor([[0.3], [1.0]])
    asked = Query(Grad(w), Gaussian("minibatch", clip, 0.0))
    silos = Records.of([(sample.x.numpy(), sample.y.numpy())])
    ledger = MemoryLedger(GDP(), [[Budget(math.inf, 0.5)]] * 2, (200,))
    fed = connect("isrl", problem, silos, ledger, [0, 0], Everyone(1), Weights())
    plain = Pool(problem, sample, {"minibatch": 0.0}, 0).mean(asked)
    assert torch.allclose(plain, fed.mean(asked), atol=1e-6)
    noisy = Pool(problem, sample, {"minibatch": 1.0}, 0).mean(asked) - plain
    assert torch.allclose(noisy[1] / noisy[0], torch.full_like(noisy[0], 1 / 0.3), rtol=1e-3), (
        "noise in proportion to the clip"
    )


def test_the_choice_is_complete_and_the_same_every_time():
    order = Order(epsilon=("1",))
    one, two = (choose(order, facts(), effort=QUICK) for _ in range(2))
    assert one.words() == two.words()
    assert one.order.algorithm != AUTO
    assert all(getattr(one.order, name) is not None for name in ("model", *USUAL))
    assert Order.read(json.loads(json.dumps(one.words())), "here") == one.order
    assert one.order.weights == "records"


def test_what_was_said_stays():
    said = Order(
        model="mlp:3",
        rounds=7,
        clip=0.9,
        step=0.2,
        momentum=0.5,
        weights="equal",
        output="tail",
        epsilon=("2",),
        recalibration=0.1,
        seed=4,
    )
    found = choose(said, facts(), effort=QUICK).order
    assert replace(found, algorithm=AUTO) == said
    assert found.algorithm == "momentum"


@pytest.mark.parametrize(
    ("given", "algorithm"),
    [
        ({"phase": 3}, "spider"),
        ({"noise": "paper"}, "spider"),
        ({"algorithm": "mb-sgd"}, "mb-sgd"),
        ({}, AUTO),
    ],
)
def test_an_order_that_names_an_algorithm_or_what_only_one_has_keeps_the_usual_settings(
    given, algorithm
):
    order = Order(**given)
    assert order.algorithm == algorithm
    assert {name: getattr(order, name) for name in USUAL} == (
        USUAL if algorithm != AUTO else dict.fromkeys(USUAL)
    )


def test_silos_count_by_records_and_by_precision_where_budgets_differ():
    assert choose(Order(), facts(), effort=QUICK).order.weights == "records"
    assert choose(Order(epsilon=("3", "s1=1")), facts(), effort=QUICK).order.weights == "precision"
    assert (
        choose(Order(epsilon=("3", "s1=1"), trust="central"), facts(), effort=QUICK).order.weights
        == "records"
    )


def test_a_silo_too_small_to_help_is_named_and_so_is_whom_leaving_out_would_help():
    advice = choose(Order(epsilon=("1",)), facts(), effort=QUICK)
    assert [s["name"] for s in advice.silos if s["too_small"]] == ["s2"]
    assert [s["name"] for s in advice.silos if s["noise_without"] < 1] == ["s2"]
    said = " ".join(lines(advice))
    assert "add little at this epsilon: s2 (46 records)" in said
    assert "Leaving s2 out" in said
    assert not any(
        s["too_small"]
        for s in choose(Order(epsilon=("1",)), facts((400, 380, 420)), effort=QUICK).silos
    )


def test_more_budget_is_expected_to_be_better_and_too_little_is_said_plainly():
    found = [choose(Order(epsilon=(e,)), facts(), effort=QUICK) for e in ("0.02", "1", "8")]
    errors = [advice.expected["error"] for advice in found]
    assert errors == sorted(errors, reverse=True)
    assert [advice.enough for advice in found] == [False, True, True]
    assert "Do not train" in " ".join(lines(found[0]))
    assert "Do not train" not in " ".join(lines(found[1]))
    assert found[2].expected["not_private"] <= errors[2] < found[2].expected["guessing"]


@pytest.mark.parametrize(
    "task",
    [Task.plain(0), Task.plain(4), Task("survival", bins=3), Task("binary", 2, weights=(0.5, 1.0))],
)
def test_every_task_gets_advice(task):
    advice = choose(Order(epsilon=("8",)), facts((800, 500), task=task), effort=QUICK)
    assert advice.expected["error"] < advice.expected["guessing"]
    assert advice.order.model == ("linear" if task.kind == "regression" else advice.order.model)


def test_features_are_of_the_kinds_that_the_schema_says():
    schema = Schema.of(
        {
            "columns": {
                "age": {"type": "number", "range": [0, 110], "missing": 50, "indicator": True},
                "sex": {"type": "category", "categories": ["f", "m"]},
                "smokes": {"type": "boolean"},
            },
            "label": {"column": "y", "task": "binary", "classes": ["no", "yes"]},
        }
    )
    assert kinds_of(schema, 5) == ("number", "missing", "category", "level", "boolean")
    assert kinds_of(Task.plain(2), 2) == ("standard", "standard")
    advice = choose(Order(), facts(kinds=kinds_of(schema, 5), task=schema), effort=QUICK)
    assert advice.order.model


def test_a_category_column_is_one_of_its_values_at_a_time_in_every_world():
    kinds = ("number", "missing", "category", "level", "level", "boolean")
    for world in WORLDS:
        x = draw(world, kinds, Task.plain(2), 300, 10, 3).x
        assert x.shape == (300, 6)
        assert bool((x[:, 2:5].sum(1) == 1).all())
        assert set(x[:, [1, 2, 3, 4]].unique().tolist()) <= {0.0, 1.0}
        assert float(x[:, 1].mean()) < 0.3


def test_what_a_policy_does_not_allow_is_left_out_and_said():
    free, held = (
        choose(Order(epsilon=("8",)), facts((3000, 3000), statistics=allowed), effort=QUICK)
        for allowed in (None, ("Grad", "GradDiff"))
    )
    assert not free.left_out
    assert {row["algorithm"] for row in held.tried} <= {"momentum", "mb-sgd"}
    assert held.left_out == ("one-shot",)
    assert "a silo's policy does not allow" in " ".join(lines(held))
    assert "policy" not in " ".join(lines(free))
    assert (
        choose(Order(epsilon=("8",)), facts(statistics=("Gram",)), effort=QUICK).order.algorithm
        == "one-shot"
    )
    with pytest.raises(BadInput, match="every silo's policy allows"):
        choose(Order(epsilon=("8",)), facts(statistics=("Moments",)), effort=QUICK)


def test_what_to_expect_is_a_range_in_plain_words():
    advice = choose(Order(epsilon=("1",)), facts(), effort=QUICK)
    low, high = advice.expected["middle"]
    assert low <= advice.expected["error"] + 0.1
    assert (
        f"Expected on simulated data of this shape: error {100 * low:.0f} to {100 * high:.0f} %"
        in " ".join(lines(advice))
    )


def test_trusts_are_compared_and_the_least_that_comes_close_is_advised():
    answer = compared(Order(epsilon=("8",)), facts((2000, 2000)), effort=QUICK)
    assert answer["advised"] == "isrl"
    poor = compared(Order(epsilon=("0.15",)), facts((60,) * 30), effort=QUICK)
    errors = {
        trust: poor["trusts"][trust]["expected"]["error"]
        for trust in ("isrl", "shuffle", "central")
    }
    assert errors["central"] <= errors["shuffle"] + 0.02 < errors["isrl"]
    assert poor["advised"] == "masks"
    assert [row["records"] for row in poor["gives_up"]] == [60]


@pytest.mark.parametrize(
    ("colluding", "least", "drops"), [(0, None, 0.0), (1, None, 0.0), (2, None, 0.0), (1, 3, 0.25)]
)
def test_totals_are_tried_at_the_noise_of_their_plan_whoever_may_collude(colluding, least, drops):
    """Within a sixth of the real plan's: shares of other sizes would be twice off."""
    order = Order(epsilon=("2",), trust="masks", colluding=colluding, least=least, drops=drops)
    batch = Batch("logistic", "momentum", 8, ({"clip": 1.0, "step": 1.0, "momentum": 0.5},))
    tried = Search(order, facts(), load, QUICK)._noise_of(batch)["minibatch"]
    asked = replace(
        order, algorithm="momentum", model="logistic", rounds=8, clip=1.0, step=1.0, momentum=0.5
    )
    planned = prepare(asked, facts().names, CLINICS, dimension=20).plan.mechanisms["minibatch"]
    noise = float(planned.noise_in(len(CLINICS), sum(CLINICS)))
    assert tried == pytest.approx(noise, rel=1 / 6)


def test_models_that_bend_are_tried_only_where_the_noise_that_colluders_leave_is_little_enough_for_them():  # noqa: E501
    """Of ten silos in a total; the noise that counts is that of those who do not collude, so with
    eight of ten there is sqrt(5) times as much.
    """
    ten, searched = facts((2500,) * 10), {}
    for colluding in (0, 5, 8):
        searched[colluding] = Search(
            Order(epsilon=("1",), trust="masks", colluding=colluding), ten, load, None
        )
    curator = Search(Order(epsilon=("1",), trust="central"), ten, load, None)
    for colluding, search in searched.items():
        assert curator.worth / search.worth == pytest.approx(math.sqrt(10 / (10 - colluding)))
    assert [search.models for search in searched.values()] == [
        ["logistic", "additive:6", "mlp:16"],
        ["logistic", "additive:6", "mlp:16"],
        ["logistic"],
    ]


def test_too_many_colluders_are_refused_when_a_total_is_tried_as_when_it_is_planned():
    with pytest.raises(BadInput, match="no honest silo"):
        choose(Order(epsilon=("2",), trust="masks", colluding=3), facts(), effort=QUICK)


def test_too_few_records_are_told_how_many_would_do():
    answer = compared(Order(epsilon=("0.1",)), facts((20, 20)), effort=QUICK)
    assert answer["advised"] is None
    needed = answer["trusts"]["isrl"]["needed"]
    assert min(needed["records"]) > 40
    assert needed["epsilon"] is None or 0.1 < needed["epsilon"] <= 50
    assert choose(Order(epsilon=("0.1",)), facts(tuple(needed["records"])), effort=QUICK).enough


def test_facts_without_a_meaning_are_refused():
    for wrong in ({"counts": ()}, {"counts": (3, 0)}, {"kinds": ()}, {"kinds": ("colour",)}):
        with pytest.raises(BadInput):
            facts(**wrong)


def test_budgets_of_the_silos_own_set_the_noise():
    mine = tuple(Budget(0.5, 1e-3) for _ in CLINICS)
    tight = choose(Order(epsilon=("8",)), facts(budgets=mine), effort=QUICK)
    assert (
        tight.expected["error"]
        > choose(Order(epsilon=("8",)), facts(), effort=QUICK).expected["error"]
    )
    assert targets(tight.order, facts().names, CLINICS)[0].epsilon == 8, (
        "the order says what the user said"
    )


def test_a_settings_file_says_the_whole_choice():
    import tomllib

    found = choose(Order(epsilon=("1", "s1=2")), facts(), effort=QUICK).order
    said = tomllib.loads(settings_file(found))
    assert said["model"] == found.model
    assert said["epsilon"] == ["1", "s1=2"]
    again = Order(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    )
    assert again == found
