"""`silodp plan --trust shuffle` and `masks`: central noise, from the same dry run as ISRL-DP."""

import json
import math
from functools import partial

import pytest

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import gdp_epsilon
from silodp.server.order import Order
from silodp.simulation.planning import planned

KEYS = {
    "kind",
    "count",
    "bits_per_silo_round",
    "noise_std",
    "epsilon",
    "delta",
    "mu",
    "parameters",
    "releases",
}


def plan(
    algorithm="mb-sgd",
    *,
    records=(1238,) * 25,
    dimension: int | None = 3394,
    trust="shuffle",
    **changes,
) -> dict:
    words = {name: (repr(changes.pop(name)),) for name in ("epsilon", "delta") if name in changes}
    order = Order(
        algorithm,
        **{"rounds": 50, "phase": 5, "inner": 5, "restarts": 2, "trust": trust} | words | changes,
    )
    return planned(order, records, dimension=dimension)


def refusal(**changes) -> str:
    with pytest.raises(BadInput) as refused:
        plan(**changes)
    return str(refused.value)


@pytest.mark.parametrize("epsilon", [0.75, 3.0, 18.0])
@pytest.mark.parametrize("algorithm", ["mb-sgd", "prox-sgd", "spider"])
def test_noise_is_that_of_central_dp(algorithm, epsilon):
    answer = plan(algorithm, epsilon=epsilon)
    assert len(answer["releases"]) == 1 + (algorithm == "spider")
    for kind in answer["releases"]:
        noise = kind["noise_std"]
        assert noise["shuffle"] == pytest.approx(noise["central"], rel=1e-6)
        assert noise["isrl"] == pytest.approx(5 * noise["central"])  # sqrt(25)
        assert kind["bits_per_silo_round"] == 64 * 3394
        assert kind["parameters"]["counted"] == 25
    assert answer["epsilon"]["server"] == pytest.approx(epsilon, rel=1e-6)
    assert answer["epsilon"]["server"] <= epsilon < answer["epsilon"]["shuffler"]
    assert set(answer) == KEYS


def test_whoever_sees_one_silos_numbers_is_up_against_its_share_alone():
    answer = plan(records=(60,) * 4, dimension=20, delta=1e-4)
    z = answer["parameters"]["noise_multiplier"]
    assert answer["mu"] == pytest.approx(math.sqrt(50) / (z * 2), rel=1e-9)
    assert answer["epsilon"] == pytest.approx(
        {
            "server": gdp_epsilon(math.sqrt(50) / (z * math.sqrt(4)), 1e-4),
            "shuffler": gdp_epsilon(math.sqrt(50) / z, 1e-4),
        }
    )


@pytest.mark.parametrize("algorithm", ["mb-sgd", "spider", "prox-svrg"])
def test_isrl_and_central_noise_are_those_of_their_own_plans(algorithm):
    small = {"records": (300,) * 4, "delta": 1e-5}
    answer = plan(algorithm, dimension=30, **small)
    own, central = (
        plan(algorithm, trust=trust, dimension=None, **small) for trust in ("isrl", "central")
    )
    every = (one["releases"] for one in (answer, own, central))
    for kind, at_silo, at_server in zip(*every, strict=True):
        assert kind["noise_std"]["isrl"] == pytest.approx(at_silo["noise_std"] / 2)
        assert kind["noise_std"]["central"] == pytest.approx(at_server["noise_std"])


def test_fewer_silos_that_may_be_released_cost_noise_and_keep_the_budget():
    small = {"records": (200,) * 10, "dimension": 50}
    whole, part = plan(**small), plan(least=5, **small)
    assert part["noise_std"]["shuffle"] == pytest.approx(
        math.sqrt(2) * whole["noise_std"]["shuffle"], rel=0.02
    )
    assert part["noise_std"]["central"] == whole["noise_std"]["central"]
    assert part["epsilon"]["server"] <= 3.0
    assert part["parameters"]["counted"] == 5


def test_masks_have_the_arithmetic_of_a_shuffle_and_pay_for_silos_that_may_collude_and_for_drops():
    small = {"records": (200,) * 10, "dimension": 50}
    shuffled, masked = plan(**small), plan(trust="masks", **small)
    assert masked["parameters"] == shuffled["parameters"]
    assert masked["epsilon"] == {
        "server": shuffled["epsilon"]["server"],
        "all_others": shuffled["epsilon"]["shuffler"],
    }
    assert masked["noise_std"]["masks"] == shuffled["noise_std"]["shuffle"]
    assert masked["bits_per_silo_round"] == 32 * 50
    many = plan(trust="masks", records=(20_000_000,) * 10, dimension=3)
    assert many["bits_per_silo_round"] == 64 * 3
    wary, dropping = (
        plan(trust="masks", colluding=2, **small),
        plan(trust="masks", drops=0.1, **small),
    )
    assert wary["noise_std"]["masks"] == pytest.approx(
        math.sqrt(10 / 8) * masked["noise_std"]["masks"], rel=0.02
    )
    assert dropping["noise_std"]["masks"] == pytest.approx(
        math.sqrt(1.1) * masked["noise_std"]["masks"], rel=0.02
    )
    for answer in (wary, dropping):
        assert 2.9999 <= answer["epsilon"]["server"] <= 3.0
    assert wary["parameters"]["counted"] == 8


def test_disjoint_batches_pay_once():
    small = {"records": (500,) * 4, "dimension": 20}
    whole, parts = plan("mb-sgd", **small), plan("prox-sgd", **small)
    assert parts["parameters"]["noise_multiplier"] == pytest.approx(
        whole["parameters"]["noise_multiplier"] / math.sqrt(50), rel=1e-6
    )


def test_silos_of_different_sizes_have_one_share_at_the_smallest_delta():
    answer = plan(records=(100, 400, 250), dimension=20, least=2)
    z, delta = answer["parameters"]["noise_multiplier"], 1 / 400**2  # the smallest of their own
    assert answer["epsilon"]["server"] == pytest.approx(gdp_epsilon(5 / z, delta), rel=1e-6)


def test_a_round_of_m_silos_is_planned_for_m():
    part = plan(records=(200,) * 10, dimension=50, participation="uniform:5")
    alone = plan(records=(200,) * 5, dimension=50)
    assert part["parameters"] == alone["parameters"]
    assert part["noise_std"] == pytest.approx(alone["noise_std"])


def test_without_a_dimension_there_is_the_noise_and_no_number_of_bits():
    assert set(plan(dimension=None)) == KEYS - {"bits_per_silo_round"}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"lipschitz": 1.0}, ("--lipschitz", "Gaussian noise")),
        ({"dimension": 0}, ("dimension is 0", "1 or more")),
        ({"trust": "central", "dimension": 0}, ("dimension is 0", "1 or more")),
        ({"trust": "isrl", "dimension": -3}, ("dimension is -3", "1 or more")),
        ({"epsilon": math.inf}, ("inf",)),
        ({"records": (10, 0)}, ("records is 0",)),
        ({"least": 26}, ("least is 26", "between 1 and 25")),
        ({"least": 3, "participation": "uniform:2"}, ("between 1 and 2",)),
        ({"algorithm": "local-sgd"}, ("local-sgd", "local steps")),
        ({"sampling": "poisson:0.1"}, ("poisson:0.1", "full or disjoint")),
        ({"noise": "paper"}, ("--noise", "isrl")),
        ({"rule": "gdp"}, ("--rule",)),
        ({"user_level": True}, ("--user-level",)),
        ({"trust": "everyone"}, ("everyone", "isrl, masks, shuffle, central")),
        ({"trust": "isrl", "least": 3}, ("--least", "shuffle")),
        ({"algorithm": "prox-sgd", "records": (20,)}, ("batches of 0",)),
        ({"trust": "isrl", "colluding": 1}, ("--colluding", "masks")),
        ({"trust": "isrl", "drops": 0.1}, ("--drops", "masks")),
        ({"trust": "masks", "drops": 1.5}, ("drops 1.5", "between 0 and 1")),
        ({"trust": "masks", "colluding": 24}, ("no honest silo", "26 silos")),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(case, words):
    sentence = refusal(**case)
    assert all(word in sentence for word in words), sentence


@pytest.fixture
def silodp(silodp):
    return partial(silodp, "plan")


def test_the_command_prints_json_and_tables(silodp):
    words = (
        "--trust",
        "shuffle",
        "--silos",
        5,
        "--records",
        200,
        "--dimension",
        40,
        "--rounds",
        10,
        "--algorithm",
    )
    code, out, _ = silodp(*words, "mb-sgd", "--json")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == KEYS
    assert set(answer["noise_std"]) == {"shuffle", "isrl", "central"}
    assert set(answer["epsilon"]) == {"server", "shuffler"}
    assert set(answer["parameters"]) == {"noise_multiplier", "counted"}
    code, out, _ = silodp(*words, "spider")
    assert code == 0
    assert all(
        word in out
        for word in (
            "spider, anchor",
            "spider, refine",
            "shares that the price counts on",
            "against the shuffler",
        )
    )


@pytest.mark.parametrize("trust", ["isrl", "central"])
def test_a_dimension_alone_changes_nothing_where_noise_does_not_depend_on_it(silodp, trust):
    """The same words with another --trust compare the three; with a constant of the theory it is
    the theory's d.
    """
    words = (
        "--trust",
        trust,
        "--silos",
        5,
        "--records",
        200,
        "--rounds",
        10,
        "--algorithm",
        "mb-sgd",
        "--json",
    )
    code, out, err = silodp(*words, "--dimension", 40)
    assert (code, err) == (0, "")
    assert out == silodp(*words)[1]
    code, _, err = silodp(*words, "--dimension", 40, "--lipschitz", 1)
    assert code == 2
    assert "the theory needs --smoothness as well" in err
    constants = ("--lipschitz", 1, "--smoothness", 1, "--pl", 1, "--gap", 1)
    assert "theory" in json.loads(
        silodp(*words[:-2], "prox-sgd", "--json", "--dimension", 40, *constants)[1]
    )


def test_the_command_refuses_in_one_sentence_and_isrl_is_the_default(silodp):
    words = ("--trust", "shuffle", "--silos", 5, "--algorithm", "local-sgd")
    code, _, err = silodp(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert "local steps" in err
    assert silodp("--silos", 2, "--records", 5, "--records", 6)[0] == 2
    assert (
        silodp("--silos", 2, "--records", 50, "--json")[1]
        == silodp("--records", 50, "--records", 50, "--trust", "isrl", "--json")[1]
    )
