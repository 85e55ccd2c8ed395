"""How much each silo counts in a mean: unbiased for its target, with the noise that its rule
promises, and nothing to the price.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian, Shuffled
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson
from silodp.core.statistics import Grad
from silodp.core.weights import RULES, Weights
from silodp.server.federation import Cohort, Everyone, Federation, Fixed, Uniform
from silodp.server.shuffled import ShuffledFederation
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.federation import Recording
from silodp.wire.inprocess import InProcess, ThroughShuffler

COUNTS = (100, 1000, 200, 700)
FALSE_ALARM = 1e-6
CENTRES = torch.tensor([[[3.0, -1.0], [0.5, 2.0], [-2.0, 0.0], [1.0, 1.0]]], dtype=torch.float64)


def gaussian(multiplier=1.0, sampling=FullBatch()):  # noqa: B008
    return Gaussian("a", 1.0, multiplier, sampling)


def target(weights):
    return (torch.tensor(weights, dtype=torch.float64)[None, :, None] * CENTRES).sum(1) / sum(
        weights
    )


@pytest.mark.parametrize("silos", [(0,), (2, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_weights_are_the_plain_mean_bit_for_bit(silos, dtype):
    value = torch.randn(3, len(silos), 7, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for weights in (Weights(), Weights("equal", COUNTS)):
        assert torch.equal(gaussian().combine(value, silos, weights), value.mean(1))


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [("equal", (1, 1, 1, 1)), ("records", COUNTS), ("precision", tuple(n**2 for n in COUNTS))],
)
def test_a_weighted_mean_is_the_target_of_its_rule_where_all_answer(rule, wanted):
    got = gaussian().combine(CENTRES, (0, 1, 2, 3), Weights(rule, COUNTS))
    assert torch.allclose(got, target(wanted))


def test_a_silo_counts_by_the_records_that_it_trains_on():
    got = gaussian().combine(CENTRES, (0, 1, 2, 3), Weights("records", COUNTS, (50, 0, 0, 200)))
    assert torch.allclose(got, target((50, 1000, 200, 500)))


def test_precision_follows_each_silos_own_noise_and_batch():
    multipliers = torch.tensor([[1.0, 5.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    got = gaussian(multipliers, DisjointBatches(30)).combine(
        CENTRES.expand(2, -1, -1), (0, 1, 2, 3), Weights("precision", COUNTS)
    )
    batches = [n // 30 for n in COUNTS]
    for j, row in enumerate(multipliers.tolist()):
        assert torch.allclose(
            got[j : j + 1], target(tuple((b / z) ** 2 for b, z in zip(batches, row, strict=True)))
        )
    by_rate = gaussian(multipliers[:1], Poisson(0.1)).combine(
        CENTRES, (0, 1, 2, 3), Weights("precision", COUNTS)
    )
    assert torch.allclose(
        by_rate,
        target(tuple((0.1 * n / z) ** 2 for n, z in zip(COUNTS, (1, 5, 1, 2), strict=True))),
    )


@pytest.mark.parametrize(
    ("multiplier", "wanted"),
    [(0.0, (100**2, 1000**2, 200**2, 700**2)), ([[0.0, 1.0, 0.0, 9.0]], (1, 0, 4, 0))],
)
def test_silos_without_noise_share_the_precision_by_their_batches(multiplier, wanted):
    multiplier = torch.tensor(multiplier, dtype=torch.float64)
    assert torch.allclose(
        gaussian(multiplier).combine(CENTRES, (0, 1, 2, 3), Weights("precision", COUNTS)),
        target(wanted),
    )


@pytest.mark.parametrize("rule", RULES)
def test_weights_are_renormalised_over_those_who_answered(rule):
    multipliers = torch.tensor([[1.0, 5.0, 1.0, 2.0]], dtype=torch.float64)
    ones = torch.ones(1, 2, 5, dtype=torch.float64)
    for silos in [(0, 1), (3, 1), (2, 0)]:
        assert torch.allclose(
            gaussian(multipliers).combine(ones, silos, Weights(rule, COUNTS)), ones[:, 0]
        )
    raw = {"equal": (1, 1), "records": (700, 1000), "precision": (350**2, 200**2)}[rule]
    got = gaussian(multipliers).combine(CENTRES[:, [3, 1]], (3, 1), Weights(rule, COUNTS))
    assert torch.allclose(got, (CENTRES[:, 3] * raw[0] + CENTRES[:, 1] * raw[1]) / sum(raw))


@pytest.mark.parametrize("rule", RULES)
def test_the_mean_of_noisy_releases_is_unbiased_with_the_variance_of_its_weights(rule):
    """20,000 draws: mean and variance each within the interval of a false-alarm rate of 1e-6."""
    draws, multipliers = 20_000, torch.tensor([[1.0, 2.0, 0.5, 1.0]], dtype=torch.float64)
    mechanism, weights, silos = gaussian(multipliers), Weights(rule, COUNTS), (0, 1, 2, 3)
    std = torch.tensor(
        [float(multipliers[0, i]) * mechanism.sensitivity(n) for i, n in enumerate(COUNTS)],
        dtype=torch.float64,
    )
    noise = (
        torch.from_numpy(np.random.default_rng(5).normal(size=(draws, 4, 1))) * std[None, :, None]
    )
    got = mechanism.combine(CENTRES[:, :, :1] + noise, silos, weights)[:, 0]
    raw = {"equal": (1, 1, 1, 1), "records": COUNTS, "precision": tuple((1 / std**2).tolist())}[
        rule
    ]
    shares = torch.tensor(raw, dtype=torch.float64) / sum(raw)
    variance = float((shares**2 * std**2).sum())
    z = stats.norm.isf(FALSE_ALARM / 2)
    assert abs(float(got.mean()) - float(target(raw)[0, 0])) < z * math.sqrt(variance / draws)
    low, high = stats.chi2.interval(1 - FALSE_ALARM, draws - 1)
    assert low < (draws - 1) * float(got.var()) / variance < high


def test_precision_has_the_least_noise_and_records_less_than_equal():
    multipliers = torch.tensor([[1.0, 2.0, 0.5, 1.0]], dtype=torch.float64)
    std = multipliers[0] / torch.tensor(COUNTS)
    mechanism, silos = gaussian(multipliers), (0, 1, 2, 3)

    def noise(rule):
        basis = torch.eye(4, dtype=torch.float64)[
            None
        ]  # silo i answers e_i: the combination is its weights
        return float((mechanism.combine(basis, silos, Weights(rule, COUNTS))[0] * std).norm())

    random = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), 500))
    assert noise("precision") <= float((random * std).norm(dim=1).min())
    assert noise("precision") == pytest.approx(float((1 / std**2).sum()) ** -0.5)
    assert noise("precision") < noise("records") < noise("equal")


def test_of_m_uniformly_drawn_silos_equal_weights_are_unbiased():
    """6,000 rounds of 2 of 4 silos against the mean over silos, at a false-alarm rate of 1e-6."""

    class Silos:
        def ask(self, query, silos):
            return type("Answer", (), {"value": CENTRES[:, list(silos)], "silos": tuple(silos)})()

    fed = Federation(Silos(), Uniform(4, 2, seed=4), Weights("equal", COUNTS))
    found = torch.stack(
        [fed.mean(Query(Grad(torch.zeros(1, 2)), gaussian()))[0] for _ in range(6000)]
    )
    error = (found.mean(0) - CENTRES[0].mean(0)) / (found.std(0) / math.sqrt(6000))
    assert float(error.abs().max()) < stats.norm.isf(FALSE_ALARM / 4)


# --- the port ------------------------------------------------------------------------------------


def federation(weights, participation=None, multiplier=1.0):
    """A simulated federation of three silos of 20, 60 and 30 records, its recording channel and its
    ledger.
    """
    problem, rng = Problem(nn.Linear(3, 2), cross_entropy), np.random.default_rng(2)
    records = Records.of(
        [
            (rng.normal(size=(n, 3)).astype(np.float32), (rng.random(n) < 0.5).astype(np.int64))
            for n in (20, 60, 30)
        ]
    )
    ledger = MemoryLedger(
        GDP(), [[Budget(50.0 if multiplier else math.inf, 1e-5)] * 3], records.counts
    )
    gate = Gate(Simulated(problem, records, [7]), ledger, dim=problem.dim, counts=records.counts)
    channel = Recording(InProcess(gate))
    query = Query(Grad(problem.initial([0])), Gaussian("a", 1.0, multiplier))
    return Federation(channel, participation or Everyone(3), weights), channel, ledger, query


def test_neither_release_nor_sensitivity_nor_price_depends_on_the_servers_weights():
    seen = []
    for rule in RULES:
        fed, channel, ledger, query = federation(Weights(rule, (20, 60, 30)))
        mean = fed.mean(query)
        (_, silos, release), *others = channel.log
        assert not others
        seen.append((release.value, silos, vars(release.event), ledger.epsilon(), mean))
    for value, silos, event, spent, _ in seen[1:]:
        assert torch.equal(value, seen[0][0]), (
            "a gate released something else because of weights that it does not know"
        )
        assert silos == seen[0][1]
        assert event == seen[0][2]
        assert np.array_equal(spent, seen[0][3])
    assert not torch.equal(seen[0][4], seen[1][4])
    assert not torch.equal(seen[1][4], seen[2][4])


@pytest.mark.parametrize("rule", RULES)
def test_cohorts_and_single_silos_keep_the_weights(rule):
    fed, channel, _, query = federation(Weights(rule, (20, 60, 30)), multiplier=0.0)
    means = {i: port.mean(query) for i, port in fed.each().items()}
    for i, (_, silos, release) in enumerate(channel.log):
        assert silos == (i,)
        assert torch.equal(means[i], release.value[:, 0]), (
            "a silo's own answer has weight 1, exactly"
        )
    raw = {"equal": (1, 1, 1), "records": (20, 60, 30), "precision": (400, 3600, 900)}[rule]
    wanted = sum(means[i] * a for i, a in enumerate(raw)) / sum(raw)
    assert torch.allclose(fed.cohort().mean(query), wanted, atol=1e-6)


def test_a_cohort_weighs_those_who_answered():
    class OneAway:
        def ask(self, query, silos):
            there = [i for i in silos if i != 1]
            return type("Answer", (), {"value": CENTRES[:, there], "silos": tuple(there)})()

    cohort = Federation(OneAway(), Cohort((0, 1, 3)), Weights("records", COUNTS))
    for _ in range(2):
        got = cohort.mean(Query(Grad(torch.zeros(1, 2)), gaussian()))
        assert torch.allclose(got, (100 * CENTRES[:, 0] + 700 * CENTRES[:, 3]) / 800)
    assert cohort._participation.members == (0, 3)


# --- totals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["equal", "precision"])
def test_a_total_over_silos_of_different_sizes_has_weights_by_records_only(rule):
    with pytest.raises(
        BadInput,
        match=(
            f"weights are {rule}, but a total over silos of 20, 60 records counts each record "
            "alike; use weights"
        ),
    ):
        ShuffledFederation(ThroughShuffler(None, (20, 60)), Everyone(2), Weights(rule, (20, 60)))
    with pytest.raises(BadInput, match="counts each record alike"):
        Shuffled("a", 1.0, 10, 10, 80).combine(
            torch.zeros(1, 1, 2), (0, 1), Weights(rule, (20, 60))
        )
    with pytest.raises(BadInput, match="counts each record alike"):
        Weights(rule, (40, 40), (0, 20)).for_totals()
    ShuffledFederation(ThroughShuffler(None, (20, 20)), Everyone(2), Weights(rule, (20, 20)))


def test_the_mean_of_a_total_is_over_records_whatever_its_weights_are_called():
    mechanism, total = (
        Shuffled("a", 2.0, 0.5, counted=2),
        torch.tensor([[[400.0, 250.0]]], dtype=torch.float64),
    )
    found = [mechanism.combine(total, (0, 1), Weights(rule, (20, 20))) for rule in RULES]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # e = 2 and b = 1 in the step 2^(e - 17 - b) of the lattice. In it, the share of the noise is
    # 0.5 x 2 x 2 x 2^16 = 2^17, which is 64 sqrt(2) in a step that is 2^10 times as large.
    assert torch.equal(found[0], total[:, 0] * 2.0**-6 / 40)


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("size", (1, 2)), "weights are 'size'; choose equal, records or precision"),
        (("records",), "weights by records need the number of records of each silo"),
        (("precision", ()), "weights by precision need the number of records"),
        (("records", (3, 4), (1,)), "each must keep 1 or more"),
        (("records", (3, 4), (0, 4)), "each must keep 1 or more"),
    ],
)
def test_senseless_weights_are_refused_in_one_sentence(given, sentence):
    with pytest.raises(BadInput, match=sentence):
        Weights(*given)


def test_fixed_members_keep_their_own_weights():
    assert (
        Federation(None, Fixed((0, 1)), Weights("records", COUNTS)).cohort()._weights.rule
        == "records"
    )
