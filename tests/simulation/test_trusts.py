"""`silodp train` under each trust: what it spends is what `silodp plan` says, against whom, and on
the batches that really ran.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.statistics import Grad
from silodp.core.weights import Weights
from silodp.server.federation import Everyone, Fixed
from silodp.server.order import Order
from silodp.server.plan import calibrate
from silodp.server.prepare import prepare
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import Curator, connect
from silodp.simulation.planning import planned
from silodp.simulation.scoring import evaluate_run
from silodp.simulation.source import Source
from silodp.simulation.training import train

SMALL = Order(
    "spider", model="logistic", rounds=4, phase=2, epsilon=("2",), delta=("1e-4",), seed=0
)
SIZES = (40, 60, 50)


@pytest.fixture
def source(tmp_path):
    for name, n in zip("abc", SIZES, strict=True):
        (tmp_path / f"{name}.csv").write_text(
            "x,z,label\n" + "".join(f"{k % 7},{k % 5},{k % 2}\n" for k in range(n))
        )
    return Source(
        silos=tuple(tmp_path / f"{name}.csv" for name in "abc"), classes="0,1", scale="none"
    )


@pytest.mark.parametrize("participation", ["all", "uniform:2", "random:2:3", "balanced:2"])
@pytest.mark.parametrize("trust", ["isrl", "masks", "shuffle", "central"])
def test_a_run_spends_what_its_plan_says_and_no_more(source, tmp_path, trust, participation):
    order = replace(SMALL, trust=trust, participation=participation)
    plan = planned(order, SIZES, dimension=3)
    ran = train(order, source, tmp_path / "run")
    assert ran["trust"] == trust
    assert ran == json.loads((tmp_path / "run/summary.json").read_text())
    spent = [silo["spent_epsilon"] for silo in ran["silos"]]
    if trust in ("masks", "shuffle"):
        most, local = (
            plan["epsilon"]["server"],
            max(silo["local_epsilon_at_most"] for silo in ran["silos"]),
        )
        assert "against the server" in ran["said"]
        planned_local = plan["epsilon"]["shuffler" if trust == "shuffle" else "all_others"]
        assert local <= planned_local * (1 + 1e-9)
        assert local > max(spent)
        if participation == "all":
            assert local == pytest.approx(planned_local)
    else:
        most = max(silo["spent_epsilon"] for silo in plan["silos"])
    assert max(spent) <= most * (1 + 1e-9)
    if participation == "all" or trust == "central":
        assert spent == pytest.approx([most] * 3)


def test_an_evaluation_counts_on_as_many_shares_of_noise_as_its_training(
    source, tmp_path, monkeypatch
):
    """A total that counted on those who collude too would not be passed on."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    order = replace(SMALL, trust="masks", colluding=1)
    ran = train(order, replace(source, held_out=0.3), tmp_path / "run")
    found = evaluate_run(tmp_path / "run", epsilon="1", seed=0)
    assert [silo["spent_epsilon"] for silo in found["silos"]] == pytest.approx([1.0] * 3)
    assert min(found["in_all"][0].values()) > 0
    assert found["in_all"][0]["epsilon"] > ran["silos"][0]["spent_epsilon"]


def test_a_curators_answer_is_over_the_records_of_whoever_takes_part():
    generator = torch.Generator().manual_seed(0)
    records = Records.of(
        [
            (torch.randn(n, 2, generator=generator).numpy(), torch.arange(n).numpy() % 2)
            for n in SIZES
        ]
    )
    problem = Problem(*model_by_name("logistic", 2, 2))
    w, ledger = (
        problem.initial([0]),
        MemoryLedger(_plan().rule, _plan().budgets.tolist(), [sum(SIZES)]),
    )
    none = Gaussian("minibatch", 1.0, 0.0)
    curator = Curator(problem, records, [0])
    for who in ((0, 1, 2), (1,), (0, 2)):
        curator.present = who
        alone = Curator(
            problem,
            Records.of(
                [
                    (records.x[i, :n].numpy(), records.y[i, :n].numpy())
                    for i, n in enumerate(SIZES)
                    if i in who
                ]
            ),
            [0],
        )
        found, wanted = (one.answer(Query(Grad(w), none), [0])[0, 0] for one in (curator, alone))
        assert torch.allclose(found, wanted, atol=1e-6)
    fed = connect(
        "central", problem, records, ledger, [0], Fixed((0, 1)), Weights("equal", records.counts)
    )
    assert fed.mean(Query(Grad(w), _plan().mechanisms["minibatch"])).shape == w.shape
    assert ledger.used()[0, 0] > 0


def test_no_record_is_in_two_batches_of_a_curators_partition_whoever_takes_part():
    records = Records.of([(torch.zeros(n, 2).numpy(), torch.arange(n).numpy() % 2) for n in SIZES])
    curator, seen = (
        Curator(Problem(*model_by_name("logistic", 2, 2)), records, [0]),
        torch.zeros(sum(SIZES)),
    )
    for index, who in enumerate(((0, 1, 2), (1,), (0, 2), (2, 1), (0,))):
        curator.present = who
        seen += curator._weight(DisjointBatches(5, index), [0])[0]
    assert seen.max() == 1


def _plan():
    def run(fed, problem, w, *, minibatch):
        yield fed.mean(Query(Grad(w), minibatch))

    from silodp.core.privacy.accounting import Budget

    return calibrate(
        run,
        {"minibatch": Gaussian("minibatch", 1.0, 0.0, FullBatch())},
        [Budget(2.0, 1e-4)],
        [sum(SIZES)],
        Everyone(1),
    )


def test_anchors_on_full_batches_with_sampled_differences_are_priced_for_what_runs(
    source, tmp_path
):
    order = replace(SMALL, sampling="anchor=full,refine=poisson:0.2")
    plan = planned(order, SIZES)
    assert plan["rule"] == "committed"
    ran = train(order, source, tmp_path / "run")
    assert [silo["spent_epsilon"] for silo in ran["silos"]] == pytest.approx(
        [silo["spent_epsilon"] for silo in plan["silos"]]
    )
    assert max(silo["spent_epsilon"] for silo in ran["silos"]) <= 2.0
    made = prepare(order, "abc", SIZES)
    assert {kind: str(sampling) for kind, sampling in made.samplings.items()} == {
        "anchor": "FullBatch()",
        "refine": "Poisson(rate=0.2)",
    }
    with pytest.raises(BadInput, match="each kind of release"):
        planned(replace(SMALL, sampling="refine=poisson:0.2"), SIZES)


@pytest.mark.parametrize("algorithm", ["spider", "prox-svrg", "prox-pl-svrg", "prox-sgd"])
def test_a_theorems_schedule_and_noise_are_run_and_priced_as_they_are(source, tmp_path, algorithm):
    order = Order(
        algorithm,
        model="logistic",
        noise="theory",
        epsilon=("1",),
        delta=("1e-5",),
        lipschitz=1.0,
        smoothness=0.5,
        pl=0.4,
        gap=5.0,
        seed=0,
    )
    plan = planned(order, SIZES, dimension=3)
    ran = train(order, source, tmp_path / "run")
    assert [s["spent_epsilon"] for s in ran["silos"]] == pytest.approx(
        [s["spent_epsilon"] for s in plan["silos"]]
    )
    assert all(0 < s["spent_epsilon"] <= 1 for s in ran["silos"])
    theory = plan["theory"]
    assert plan["order"]["rounds"] == theory["rounds"] * theory["restarts"]
    assert plan["order"]["step"] == theory["step"]
    sigma = theory["noise"].get("sigma", theory["noise"].get("sigma_1"))
    assert plan["silos"][0]["releases"][0]["noise_std"] == pytest.approx(sigma)
    with pytest.raises(BadInput, match="needs --smoothness as well"):
        planned(replace(order, smoothness=None), SIZES, dimension=3)


def test_weights_change_the_mean_and_not_the_price(source, tmp_path):
    ran = {
        rule: train(replace(SMALL, weights=rule), source, tmp_path / rule)
        for rule in ("equal", "records", "precision")
    }
    assert len({str([s["spent_epsilon"] for s in one["silos"]]) for one in ran.values()}) == 1
    for trust in ("shuffle", "central"):
        with pytest.raises(BadInput, match="precision"):
            replace(SMALL, trust=trust, weights="precision")


def test_a_plan_has_the_noise_of_the_mean_as_the_orders_weights_make_it():
    sizes, found = (100, 400), {}
    for rule in ("equal", "records", "precision"):
        plan = planned(replace(SMALL, weights=rule), sizes)
        stds = [silo["releases"][0]["noise_std"] for silo in plan["silos"]]
        shares = {
            "equal": (0.5, 0.5),
            "records": (0.2, 0.8),
            "precision": [s**-2 / sum(t**-2 for t in stds) for s in stds],
        }[rule]
        found[rule] = plan["mean_noise_std"][plan["silos"][0]["releases"][0]["kind"]]
        assert found[rule] == pytest.approx(
            math.hypot(*(a * s for a, s in zip(shares, stds, strict=True))), rel=1e-6
        )
    assert found["precision"] < found["records"] < found["equal"]
    alone = planned(
        replace(SMALL, participation="uniform:1"), (100, 100)
    )  # whoever is drawn, its own noise
    assert [*alone["mean_noise_std"].values()] == pytest.approx(
        [r["noise_std"] for r in alone["releases"]], rel=1e-6
    )


EACH = """
from silodp import Gaussian, Grad, Query

def _asked(fed, w, minibatch):
    return [silo.mean(Query(Grad(w), minibatch)) for silo in fed.each().values()]

def apart(fed, problem, w, *, rounds: int, step, minibatch: Gaussian):
    for _ in range(rounds):
        w = w - step * sum(_asked(fed, w, minibatch)) / 3
        yield w
"""


@pytest.mark.parametrize(
    "words", [{"trust": "central"}, {"trust": "shuffle"}, {"weights": "records"}]
)
@pytest.mark.parametrize("own", [False, True])
def test_silos_are_not_asked_one_by_one_where_one_answers_for_all(source, tmp_path, words, own):
    """A curator would be asked N times for each question of the plan, and the run would end when
    its budget does.
    """
    (tmp_path / "each.py").write_text(EACH)
    algorithm = f"{tmp_path / 'each.py'}:apart" if own else "scaffold"
    with pytest.raises(
        BadInput,
        match="local steps"
        if words == {"trust": "shuffle"} and not own
        else "asks silos one by one",
    ):
        train(replace(SMALL, algorithm=algorithm, **words), source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_curators_plan_is_for_as_many_records_as_take_part_on_average():
    found = [
        planned(replace(SMALL, trust="central", participation=who), (100,) * 4)["records"]
        for who in ("all", "random:3", "random:2:3")
    ]
    assert found == [400, 200, 250]


def test_a_theorem_that_asks_for_more_rounds_than_anybody_can_wait_for_is_refused():
    endless = replace(
        SMALL, noise="theory", epsilon=("1e6",), lipschitz=1.0, smoothness=1.0, gap=1.0
    )
    with pytest.raises(BadInput, match="rounds, more than 100,000"):
        planned(endless, SIZES, dimension=3)


def test_what_the_trust_does_not_go_with_is_named_as_it_was_given():
    with pytest.raises(BadInput, match="--from-theory belongs to --trust isrl"):
        Order(trust="central", noise="theory")
    with pytest.raises(BadInput, match="--rule belongs to --trust isrl"):
        Order(trust="shuffle", rule="renyi")


def test_a_curators_ledger_takes_the_rule_that_is_named(source, tmp_path):
    order = replace(SMALL, trust="central", rule="renyi")
    ran = train(order, source, tmp_path / "run")
    assert (ran["rule"], planned(order, SIZES)["rule"]) == ("renyi", "renyi")
    assert ran["silos"][0]["spent_epsilon"] == pytest.approx(planned(order, SIZES)["spent_epsilon"])


def test_a_batch_of_epsilons_has_the_noise_of_each_order_alone():
    for trust in ("isrl", "shuffle", "central"):
        order = replace(SMALL, trust=trust)
        batch = prepare(order, "abc", SIZES, dimension=3, epsilons=(0.5, 4.0)).plan
        for row, epsilon in enumerate(("0.5", "4")):
            alone = prepare(replace(order, epsilon=(epsilon,)), "abc", SIZES, dimension=3).plan
            for kind, mechanism in alone.mechanisms.items():
                for name in ("noise_multiplier",):
                    if hasattr(mechanism, name):
                        assert torch.equal(
                            getattr(batch.mechanisms[kind], name)[row], getattr(mechanism, name)[0]
                        ), (trust, kind, name)


@pytest.mark.parametrize("text", ["rounds=10", "local-steps=3"])
def test_a_setting_with_an_option_of_its_own_is_not_set_beside_it(source, tmp_path, text):
    """Disjoint batches are as many as --rounds says: a question beyond them was refused in the
    middle of the run.
    """
    with pytest.raises(BadInput, match="instead of --set"):
        train(replace(SMALL, algorithm="prox-sgd", settings=(text,)), source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_user_level_epsilon_beyond_every_float_is_refused(source, tmp_path):
    with pytest.raises(BadInput, match="delta is"):
        train(
            replace(SMALL, user_level=True, sampling="poisson:0.5", epsilon=("1000",)),
            source,
            tmp_path / "run",
        )
