"""Every answer that a deployed gate gives is measured against its price, and every mistake in one
is caught.

The deployed noise and coins are the operating system's: a probe alarms falsely with probability
1e-8 or less, all of this file's together below 1e-6. What is planted is seen with probability
0.9999 or more. Everything else has fixed seeds.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from mistakes import answers as mistakes_answers
from mistakes import mutants
from silodp.audit import bounds, normal, report, report_answers
from silodp.audit.answers import Answering, Row, answerable
from silodp.audit.pipeline import SOUND, Caught
from silodp.audit.probes_answers import ANSWERS, RATE, noise_of
from silodp.audit.probes_batches import BATCHES, COINS, GROUPS, MANY, check_coins
from silodp.audit.transcript import Case
from silodp.core import mechanisms, statistics
from silodp.core import sampling as samplings
from silodp.core.privacy.accounting import gdp_epsilon
from silodp.silo.answer import exact as exact_module

ROWS = answerable()


# --- the list ------------------------------------------------------------------------------------


def test_the_list_has_every_statistic_mechanism_and_sampling_that_a_gate_answers():
    assert len(ROWS) == 71
    for part, kinds in (
        ("statistic", statistics.STATISTICS),
        ("mechanism", mechanisms.MECHANISMS),
        ("sampling", samplings.SAMPLINGS),
    ):
        assert {getattr(row, part) for row in ROWS} == set(kinds.values())
    assert Row(statistics.LocalSteps, mechanisms.Gaussian, samplings.Poisson) in ROWS
    assert Row(statistics.LocalSteps, mechanisms.Shuffled, samplings.FullBatch) not in ROWS
    assert Row(statistics.Moments, mechanisms.Gaussian, samplings.Poisson) not in ROWS


def test_whatever_looks_like_a_statistic_or_a_sampling_is_on_the_question_port():
    files = [
        importlib.import_module(f"{statistics.__name__}.{found.name}")
        for found in pkgutil.iter_modules(statistics.__path__)
    ]
    classes = [
        c
        for file in (*files, samplings)
        for _, c in inspect.getmembers(file, inspect.isclass)
        if c.__module__ == file.__name__ and dataclasses.is_dataclass(c)
    ]
    assert {c for c in classes if hasattr(c, "shape")} == set(statistics.STATISTICS.values())
    assert {c for c in classes if hasattr(c, "batch")} == set(samplings.SAMPLINGS.values())


PORTS = {
    "Statistic": statistics.STATISTICS,
    "Mechanism": mechanisms.MECHANISMS,
    "Sampling": samplings.SAMPLINGS,
}


@pytest.mark.parametrize("port", PORTS)
def test_what_somebody_adds_without_an_example_stops_the_audit(monkeypatch, port):
    class Forgotten:
        pass

    monkeypatch.setitem(PORTS[port], "Forgotten", Forgotten)
    with pytest.raises(AssertionError, match="Forgotten has no example"):
        answerable.__wrapped__()


def test_a_row_cannot_drop_out_because_its_example_is_refused(monkeypatch):
    monkeypatch.setattr(statistics.Cells, "norm", property(lambda self: 0.1))
    with pytest.raises(
        AssertionError,
        match=r"refuses the audit's example of ClassCounts, Gaussian, FullBatch \(clip\)",
    ):
        answerable.__wrapped__()


# --- normals, by fixed seeds ---------------------------------------------------------------------


def test_standard_normals_pass():
    for seed in range(20):
        random = np.random.default_rng(seed)
        normal.look(random.standard_normal((8, 2000)), "normals", 1e-4)


def _quiet_block(z):
    z[:, 100:200] *= 0.5


def _one_dead(z):
    z[:, 7] = 0


def _mirror(z):
    z[3] = z[2, ::-1]


def _shifted(z):
    z[4] = np.roll(z[1], 11)


def _shared(z):
    z += 0.1 * np.random.default_rng(9).standard_normal((len(z), 1)) * 5


def _twin(z):
    z[:, 1::2] = z[:, ::2]


def _uniform(z):
    z[:] = np.random.default_rng(8).uniform(-(3**0.5), 3**0.5, z.shape)


def _one_sign(z):
    np.abs(z, out=z)


@pytest.mark.parametrize(
    "spoil", [_quiet_block, _one_dead, _mirror, _shifted, _shared, _twin, _uniform, _one_sign]
)
def test_noise_that_is_not_what_is_paid_for_is_seen(spoil):
    z = np.random.default_rng(5).standard_normal((8, 2000))
    spoil(z)
    with pytest.raises(Caught):
        normal.look(z, "spoiled", 1e-9)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1])
def test_noise_that_is_a_tenth_too_small_or_too_large_is_seen(factor):
    for seed in range(20):
        with pytest.raises(Caught, match="times the standard deviation"):
            normal.sizes(
                factor * np.random.default_rng(seed).standard_normal((8, 2000)), "scaled", 1e-10
            )


def test_the_last_byte_shows_noise_in_steps():
    noise = np.rint(np.random.default_rng(6).standard_normal(8000) * 1e6).astype(np.int64)
    normal.low_bits(noise, "whole", 1e-6)
    with pytest.raises(Caught, match="every point of the lattice"):
        normal.low_bits(noise // 2 * 2, "even", 1e-6)


# --- coins, by fixed seeds -----------------------------------------------------------------------


def _tossed(seed, rate, steps=1):
    """Counts of blocks and residues as a release shows them: a group of one block and one residue
    has 256 records.
    """
    each = np.random.default_rng(seed).binomial(
        steps * MANY // GROUPS**2, rate, (10, GROUPS, GROUPS)
    )
    return np.concatenate([each.sum(2), each.sum(1)], 1)


def test_fair_coins_pass_and_a_rate_that_is_off_by_2_per_cent_is_seen():
    row = Row(statistics.Grad, mechanisms.Gaussian, samplings.Poisson)
    for seed in range(20):
        check_coins(row, _tossed(seed, COINS), 1e-4)
        for factor in (0.98, 1.02, 1.1):
            with pytest.raises(Caught, match="the rate that is paid for"):
                check_coins(row, _tossed(seed, factor * COINS), 1e-9)


def test_coins_tossed_once_for_three_steps_or_kept_for_the_next_question_are_seen():
    row = Row(statistics.LocalSteps, mechanisms.Gaussian, samplings.Poisson)
    check_coins(row, _tossed(1, COINS, steps=3), 1e-4)
    with pytest.raises(Caught):
        check_coins(row, 3 * _tossed(1, COINS), 1e-9)
    kept = _tossed(2, COINS, steps=3)
    kept[5] = kept[2]
    with pytest.raises(Caught, match="same batch"):
        check_coins(row, kept, 1e-9)


@pytest.fixture
def tried(monkeypatch):
    """Gates that do not try their kernels when they start (tests/silo/answer does), which takes
    most of a silo's start.
    """
    monkeypatch.setattr(exact_module.Exact, "verify", lambda self: None)


# --- the deployed path ---------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_half_noise_is_seen_in_every_answer(row, folder, tried):
    silo = Answering(folder / "silo", mutants.OF_ANSWERS[f"half noise: {row}"], row.mechanism)
    with pytest.raises(Caught, match="times the standard deviation"):
        normal.look(noise_of(row, silo, 2), str(row), RATE)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_tenth_of_a_deployed_gates_noise_is_seen(factor, tmp_path):
    @contextmanager
    def planted():
        shipped = exact_module.noise_scale
        with mock.patch.object(
            exact_module, "noise_scale", lambda *words: factor * shipped(*words)
        ):
            yield

    row = Row(statistics.GradDiff, mechanisms.Gaussian, samplings.FullBatch)
    silo = Answering(
        tmp_path / "silo",
        replace(SOUND, exact=mistakes_answers.where(row.of, planted)),
        mechanisms.Gaussian,
    )
    with pytest.raises(Caught, match="times the standard deviation"):
        normal.look(noise_of(row, silo), str(row), RATE)


CAUGHT_BY = {
    "half noise of few coordinates": "noise of small answers",
    "noise of one sign": "noise of every answer",
    "one draw for all coordinates": "noise of every answer",
    "last coordinate without noise": "noise of every answer",
    "second half of the noise is the first": "noise of every answer",
    "noise in steps of 256": "lattice of every answer",
    "noise given again": "noise of every answer",
    "noise in the first local step only": "noise of every answer",
    "noise for a shorter clip": "reach of every answer",
    "noise for shorter factors": "reach of every answer",
    "held-out records in training answers": "reach of every answer",
    "one sub-sampled batch for all questions": "coins",
    "one record more without replacement": "batches without replacement",
    "one coin for two records": "coins",
    "partition drawn anew": "records and price of every answer",
    "local steps charged for one less": "records and price of every answer",
    "coins charged at half their rate": "records and price of every answer",
    "recalibration unpriced": "records and price of every answer",
    "scaled gradients clipped before they are scaled": "reach of every answer",
    "noise of scaled gradients without their sensitivity": "noise of every answer",
    "noise of evaluations without their sensitivity": "noise of every answer",
    "errors of evaluations cut at twice their cap": "reach of every answer",
    "training records in evaluations": "reach of every answer",
    "moments for the scaling of features unpriced": "records and price of every answer",
    "evaluation unpriced": "records and price of every answer",
}
COIN_MUTANTS = [
    f"coins 1.1 times as likely: {row}" for row in ROWS if row.sampling is samplings.Poisson
]


def test_every_row_has_a_mutant_and_every_mutant_of_answers_a_probe():
    assert mutants.OF_ANSWERS.keys() == {
        *(f"half noise: {row}" for row in ROWS),
        *COIN_MUTANTS,
        *CAUGHT_BY,
    }
    assert len(COIN_MUTANTS) == 5


@pytest.mark.parametrize("name", [*COIN_MUTANTS, *CAUGHT_BY])
def test_every_mistake_of_an_answer_is_caught_by_the_probe_that_is_made_for_it(name, folder, tried):
    with pytest.raises(Caught):
        (ANSWERS | BATCHES)[CAUGHT_BY.get(name, "coins")](mutants.OF_ANSWERS[name], 0, folder)


def test_the_audit_has_a_row_of_every_answer_and_alarms_where_mistakes_are_planted_together(
    monkeypatch,
):
    """Half noise on differences, local steps, histograms and moments, and coins 1.1 times as likely
    as priced.
    """
    for probes in ("ANSWERS", "BATCHES"):  # what they say beside the rows is the next test's
        monkeypatch.setattr(report_answers, probes, {})
    quiet = (statistics.GradDiff, statistics.LocalSteps, statistics.Histogram, statistics.Moments)

    class Planted(SOUND.exact):
        def answer(self, query, silos):
            planted = (
                mistakes_answers.half_noise
                if type(query.statistic) in quiet
                else mistakes_answers.likelier_coins
            )
            with planted():
                return super().answer(query, silos)

    rows, _ = report_answers.answers(replace(SOUND, exact=Planted))
    alarms = {(row["statistic"], row["sampling"]) for row in rows if row["alarm"]}
    assert len(rows) == len(ROWS)
    assert alarms == {
        (row.statistic.__name__, row.sampling.__name__)
        for row in ROWS
        if row.statistic in quiet or row.sampling is samplings.Poisson
    }


def test_every_row_of_a_sound_gate_is_quiet_and_close_to_its_price():
    rows, failed = report_answers.answers()
    assert failed == {}
    for row in rows:
        assert not row["alarm"], row["says"]
        assert 0.9 < row["noise"][1] < row["noise"][0] < row["noise"][2] < 1.1
        assert (row["coins"] is not None) == (row["sampling"] == "Poisson")


# --- claims at every delta -----------------------------------------------------------------------


def _scores(mu, runs, seed):
    random = np.random.default_rng(seed)
    return random.normal(-mu * mu / 2, mu, runs), random.normal(mu * mu / 2, mu, runs)


def _claims(mu):
    return [
        (max(0.0, gdp_epsilon(mu, delta)), delta)
        for delta in (1e-5, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.35)
    ]


def test_true_claims_are_refuted_as_rarely_as_stated_and_claims_that_are_too_small_are_refuted():
    """At level 0.05 at most 5 % of 300 may be; 32 would have probability 2e-4, and seeds are
    fixed.
    """
    assert (
        sum(bounds.refuted(*_scores(1.4, 500, seed), _claims(1.4), 0.05) for seed in range(300))
        < 32
    )
    assert all(bounds.refuted(*_scores(2.0, 4000, seed), _claims(1.4), 1e-6) for seed in range(20))
    assert not any(
        bounds.refuted(*_scores(1.4, 4000, seed), _claims(1.4), 1e-6) for seed in range(20)
    )


def test_a_row_without_the_power_to_see_half_as_much_again_says_so(silodp, monkeypatch):
    row = report.row_of(
        Case("mb-sgd", 1.0, {"rounds": 2}, samplings.Poisson(0.5), gap=report.SECRET),
        "simulated",
        100,
        0,
    )
    assert not row["sees"]
    monkeypatch.setattr(report, "audit", lambda *words, **more: [row])
    said = " ".join(silodp("audit", "--algorithm", "mb-sgd")[1].split())
    assert (
        "Too few runs to detect noise that fits only a claim 1.5 times as large: "
        "mb-sgd, poisson:0.5 at 1."
    ) in said


def test_the_poisson_row_sees_a_claim_that_is_half_as_much_again():
    """One answer with secret coins, at claim 6 and 4000 runs: the noise of claim 9 alarms, that of
    claim 6 does not.
    """
    case = Case("mb-sgd", 6.0, {"rounds": 2}, samplings.Poisson(0.5), gap=report.SECRET)
    row = report.row_of(case, "simulated", 4000, 0)
    assert row["sees"]
    assert not row["alarm"]
    assert torch.tensor(row["lower_bound"]) < 6
