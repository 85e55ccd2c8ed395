"""Contestants from other libraries spend exactly what they claim, and learn something."""

import math
import sys
import warnings

import numpy as np
import pandas as pd
import pytest

from research.board.contestant import TASKS, Case
from research.board.peers import PEERS, averaged, boosting, dpsgd
from research.board.peers.averaged import AveragedLibrary
from research.board.peers.boosting import PrivateBoosting
from research.board.peers.dpsgd import Models, Schedule, Silos, noise_for, spent
from research.board.peers.fedavg import FL4HEALTH, FLAMBY, FederatedAveraging
from research.board.peers.mean_regularised import MeanRegularised
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema

DELTA = 1e-5
TRAINED_BY_STEPS = (FederatedAveraging(FL4HEALTH), FederatedAveraging(FLAMBY), MeanRegularised())
LABELS = {
    "binary": {"column": "y", "task": "binary", "classes": ["no", "yes"]},
    "count": {"column": "y", "task": "count", "most": 20},
    "number": {"column": "y", "task": "regression", "range": [-4, 4]},
    "survival": {"task": "survival", "time": "t", "event": "e", "edges": [1, 2, 3]},
}


def table(task: str, rows: int, random: np.random.Generator) -> pd.DataFrame:
    """Return rows whose outcome follows the first column."""
    frame = pd.DataFrame(random.uniform(-2, 2, (rows, 3)), columns=["a", "b", "c"])
    line = 1.5 * frame["a"]
    match task:
        case "binary":
            frame["y"] = np.where(random.random(rows) < 1 / (1 + np.exp(-line)), "yes", "no")
        case "count":
            frame["y"] = np.minimum(random.poisson(np.exp(line / 2)), 20)
        case "number":
            frame["y"] = np.clip(line + random.normal(size=rows) / 2, -4, 4)
        case "survival":
            died = random.exponential(2 * np.exp(-line))
            last = random.uniform(0.5, 4, rows)
            frame["t"] = np.minimum(died, last)
            frame["e"] = np.where(died <= last, "1", "0")
    return frame


def tiny(task: str, epsilon: float = 3.0, sizes: tuple[int, ...] = (70, 40)) -> Case:
    """Return a made-up case."""
    random = np.random.default_rng(5)
    schema = Schema.of(
        {
            "columns": {name: {"type": "number", "range": [-2, 2]} for name in "abc"},
            "label": LABELS[task],
        }
    )
    train = {f"silo-{k}": table(task, rows, random) for k, rows in enumerate(sizes)}
    test = {f"silo-{k}": table(task, 50, random)[["a", "b", "c"]] for k in range(len(sizes))}
    return Case("tiny", schema, train, test, epsilon, DELTA, 0)


def silos_of(case: Case) -> Silos:
    """Return the silos of a case, with a generator of their own."""
    return Silos(case, np.random.default_rng(1))


def library_or_skip(contestant) -> None:
    """Skip a test whose library is not installed."""
    needed = {AveragedLibrary: averaged._library, PrivateBoosting: boosting._library}
    if type(contestant) in needed:
        try:
            needed[type(contestant)]()
        except BadInput as missing:
            pytest.skip(str(missing))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("contestant", PEERS, ids=lambda one: one.name)
def test_a_contestant_predicts_every_test_row_and_spends_the_whole_budget(contestant, task):
    if task not in contestant.tasks:
        pytest.skip(f"no {task}")
    library_or_skip(contestant)
    case = tiny(task)
    answer = contestant.predict(case)
    assert 0.99 * case.epsilon <= answer.spent <= case.epsilon
    for name, frame in case.test.items():
        predictions = answer.predictions[name]
        shape = (len(frame), 3) if task == "survival" else (len(frame),)
        assert predictions.shape == shape
        assert np.isfinite(predictions).all()
        low, high = {"count": (0, 20), "number": (-1, 1)}.get(task, (0, 1))
        assert (low <= predictions).all()
        assert (predictions <= high).all()
    again = contestant.predict(case)
    assert all(
        np.array_equal(answer.predictions[name], again.predictions[name]) for name in case.test
    )


@pytest.mark.parametrize("contestant", PEERS, ids=lambda one: one.name)
def test_with_a_large_budget_a_contestant_ranks_the_risks(contestant):
    library_or_skip(contestant)
    case = tiny("binary", epsilon=50.0, sizes=(400, 300))
    answer = contestant.predict(case)
    for name, frame in case.test.items():
        assert np.corrcoef(answer.predictions[name], frame["a"])[0, 1] > 0.7


# --- the price of DP-SGD -------------------------------------------------------------------------


def epsilon_by_the_library(rate: float, steps: int, noise: float) -> float:
    """Return the price by dp_accounting, on a fine grid."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_ONE, value_discretization_interval=2e-4
    )
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, steps)
    return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize("contestant", TRAINED_BY_STEPS, ids=lambda one: one.name)
def test_the_noise_that_is_drawn_costs_the_budget_and_no_more(contestant, monkeypatch):
    steps: list[tuple] = []
    real = Silos.step

    def watched(self, models, rates, noise, clip):
        steps.append((rates, noise))
        return real(self, models, rates, noise, clip)

    monkeypatch.setattr(Silos, "step", watched)
    contestant.predict(tiny("binary"))
    for silo in range(2):
        taken = [(rates[silo], noise[silo]) for rates, noise in steps if rates[silo] > 0]
        assert len(set(taken)) == 1
        price = epsilon_by_the_library(taken[0][0], len(taken), taken[0][1])
        assert 0.98 * 3.0 <= price <= 3.0


def test_a_full_batch_costs_what_gaussian_differential_privacy_gives():
    from silodp.core.privacy.accounting import gdp_epsilon

    noise = noise_for(Schedule(1.0, 20), 2.0, DELTA)
    assert gdp_epsilon(2 * math.sqrt(20) / noise, DELTA) == pytest.approx(2.0, rel=0.01)
    assert spent(Schedule(1.0, 20), noise, DELTA) <= 2.0


def test_the_noise_has_the_standard_deviation_that_was_paid_for():
    silos = silos_of(tiny("binary", sizes=(1, 1)))
    rates = np.array([1e-12, 1e-12])
    noise = np.array([2.0, 5.0])
    drawn = [silos.step(silos.start(), rates, noise, 1.5)[1] * 1e-12 for _ in range(2000)]
    assert np.std(drawn, axis=(0, 2)) == pytest.approx(1.5 * noise, rel=0.05)


@pytest.mark.parametrize("task", TASKS)
def test_a_replaced_row_moves_the_sum_by_two_clips_at_most(task):
    case = tiny(task)
    other = tiny(task)
    far = {"binary": "no", "count": 20, "number": 4.0}
    for frame, sign in ((case.train["silo-0"], 1), (other.train["silo-0"], -1)):
        frame.loc[0, ["a", "b", "c"]] = [2.0 * sign] * 3
        if task != "survival":
            frame.loc[0, "y"] = far[task]
    clip = 0.1
    sums = []
    for one in (case, other):
        silos = silos_of(one)
        models = Models(np.zeros((2, silos.outputs)), np.full((2, 3), 30.0))
        parts = silos.step(models, np.ones(2), np.zeros(2), clip)
        sums.append(np.concatenate([part[0] for part in parts]) * silos.counts[0])
    assert 0 < np.linalg.norm(sums[0] - sums[1]) <= 2 * clip * (1 + 1e-9)


def test_every_row_takes_part_as_often_as_the_accountant_assumes(monkeypatch):
    silos = silos_of(tiny("number"))
    taken = np.zeros(110)
    real = silos._gradients

    def watched(models, rows, silo):
        taken[rows] += 1
        return real(models, rows, silo)

    monkeypatch.setattr(silos, "_gradients", watched)
    for _ in range(2000):
        silos.step(silos.start(), np.array([0.1, 0.3]), np.ones(2), 1.0)
    assert taken[:70].mean() / 2000 == pytest.approx(0.1, rel=0.05)
    assert taken[70:].mean() / 2000 == pytest.approx(0.3, rel=0.05)
    assert (taken > 0).all()


def test_a_step_is_that_of_opacus():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("opacus")
        import torch
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer

    case = tiny("binary", sizes=(40,))
    silos = silos_of(case)
    x, y = case.training()["silo-0"]
    start = Models(np.full((1, 1), 0.3), np.array([[1.0, -2.0, 0.5]]))
    bias, slope = silos.step(start, np.ones(1), np.zeros(1), 0.4)

    layer = torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(start.slope))
        layer.bias.copy_(torch.tensor(start.bias[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GradSampleModule(layer)
        optimizer = DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            noise_multiplier=0.0,
            max_grad_norm=0.4,
            expected_batch_size=40,
        )
        loss = torch.nn.BCEWithLogitsLoss()
        loss(model(torch.tensor(x)), torch.tensor(y)[:, None]).backward()
        optimizer.step()
    assert start.slope - slope == pytest.approx(layer.weight.detach().numpy(), abs=1e-4)
    assert start.bias[0] - bias[0] == pytest.approx(layer.bias.detach().numpy(), abs=1e-4)


def test_fedavg_ends_with_one_model_and_mr_mtl_with_several():
    case = tiny("binary")
    same = {name: next(iter(case.test.values())) for name in case.test}
    case = Case(case.name, case.schema, case.train, same, 3.0, DELTA, 0)
    one = list(FederatedAveraging(FL4HEALTH).predict(case).predictions.values())
    several = list(MeanRegularised().predict(case).predictions.values())
    assert np.array_equal(one[0], one[1])
    assert not np.allclose(several[0], several[1])


# --- libraries -----------------------------------------------------------------------------------


def test_diffprivlib_is_given_the_budget_and_rows_within_its_bounds(monkeypatch):
    library_or_skip(AveragedLibrary())
    library = averaged._library()
    calls = []
    real = library.LogisticRegression.fit

    def watched(self, x, y):
        calls.append((self.epsilon, self.data_norm, np.linalg.norm(x, axis=1).max()))
        return real(self, x, y)

    monkeypatch.setattr(library.LogisticRegression, "fit", watched)
    AveragedLibrary().predict(tiny("binary"))
    assert len(calls) == 2
    for epsilon, data_norm, longest in calls:
        assert epsilon == 3.0
        assert data_norm == 1.0
        assert longest <= 1.0


@pytest.mark.parametrize("contestant", [AveragedLibrary(), PrivateBoosting()])
def test_a_silo_without_a_positive_row_takes_part(contestant):
    library_or_skip(contestant)
    case = tiny("binary")
    case.train["silo-1"]["y"] = "no"
    answer = contestant.predict(case)
    assert answer.spent <= 3.0


def test_the_noise_of_boosting_costs_the_budget_for_a_replaced_row():
    library_or_skip(PrivateBoosting())
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    x, y = tiny("binary").training()["silo-0"]
    asked = boosting.library_epsilon(3.0, DELTA)
    model = boosting.fitted(x, y, asked, DELTA, 0)
    columns, rounds, rate = 3, 300, 0.01
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    bins = dp_accounting.GaussianDpEvent(model.noise_scale_binning_ / math.sqrt(2))
    steps = dp_accounting.GaussianDpEvent(model.noise_scale_boosting_ / rate / 2)
    accountant.compose(bins, columns)
    accountant.compose(steps, columns * rounds)
    assert accountant.get_epsilon(DELTA) == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize(
    ("contestant", "package"),
    [(AveragedLibrary(), "diffprivlib"), (PrivateBoosting(), "interpret")],
)
def test_a_missing_library_is_one_clear_sentence(contestant, package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BadInput, match=f"pip install {package}"):
        contestant.predict(tiny("binary"))


def test_the_accountant_rounds_up():
    schedule = Schedule(0.1, 50)
    coarse = spent(schedule, 1.5, DELTA, 1e-2)
    assert spent(schedule, 1.5, DELTA, 1e-3) <= coarse
    assert dpsgd.noise_for(schedule, 1.0, DELTA) > dpsgd.noise_for(schedule, 3.0, DELTA)
