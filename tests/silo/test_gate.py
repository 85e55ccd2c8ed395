"""The gate: checks, then charges, then looks at a record; and it is the only place that makes a
release.
"""

import ast
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import silodp
from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query, Release
from silodp.core.sampling import DisjointBatches, FullBatch, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Histogram, LocalSteps, Moments, SteeredSteps
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate, check
from silodp.silo.ledger.memory import MemoryLedger

DIM = 4
COUNTS = (6, 9)
W = torch.zeros(1, DIM)
FINE = Gaussian("minibatch", 1.0, 2.0)


class Diary:
    """An answerer and a ledger that write down what is done to them, in order."""

    def __init__(self, *, budget=math.inf, fails=False):
        self.lines, self.fails = [], fails
        self.inner = MemoryLedger(GDP(), Budget(budget, 1e-5), COUNTS)

    def charge(self, event, silos):
        self.inner.charge(event, silos)
        self.lines.append(("charge", event.count, tuple(silos)))

    def answer(self, query, silos):
        self.lines.append(("compute", type(query.statistic).__name__, tuple(silos)))
        if self.fails:
            raise RuntimeError("a disk failed")
        return torch.zeros(1, len(silos), DIM)

    def spent(self):
        return self.inner.epsilon().tolist()


def gate_of(diary):
    return Gate(diary, diary, dim=DIM, counts=COUNTS)


def real_gate(budget=1.0, *, records=None, seeds=(0,)):
    records = records or Records.of(
        [(np.random.default_rng(n).normal(size=(n, 3)), np.zeros(n)) for n in COUNTS]
    )
    ledger = MemoryLedger(GDP(), Budget(budget, 1e-5), COUNTS)
    return Gate(
        Simulated(Problem(nn.Linear(3, 1), squared_error), records, seeds),
        ledger,
        dim=DIM,
        counts=COUNTS,
    ), ledger


def far(value):
    return torch.tensor([[0.0, value, 0.0, 0.0]])


SENSELESS = {
    "shape": [
        Query(Grad(torch.zeros(1, DIM + 1)), FINE),
        Query(Grad(torch.zeros(DIM)), FINE),
        Query(Grad(torch.zeros(1, 2, DIM)), FINE),
        Query(GradDiff(W, torch.zeros(2, DIM)), FINE),
        Query(GradDiff(W, torch.zeros(1, DIM - 1)), FINE),
        Query(LocalSteps(torch.zeros(1, 1), 2, 0.1), FINE),
        Query(SteeredSteps(torch.zeros(1, 1), 2, 0.1, W), FINE),
        Query(SteeredSteps(W, 2, 0.1, torch.zeros(1, 1)), FINE),
        Query(SteeredSteps(W, 2, 0.1, torch.zeros(2, DIM)), FINE),
        Query(SteeredSteps(W, 2, 0.1, torch.zeros(1, 2, DIM)), FINE),
        Query(SteeredSteps(W, 2, 0.1, W.half()), FINE),
        Query(SteeredSteps(W, 2, 0.1, W.long()), FINE),
    ],
    "not-finite": [
        Query(Grad(far(math.nan)), FINE),
        Query(Grad(far(math.inf)), FINE),
        Query(GradDiff(W, far(-math.inf)), FINE),
        Query(LocalSteps(far(math.nan), 2, 0.1), FINE),
        Query(SteeredSteps(far(math.nan), 2, 0.1, W), FINE),
        Query(SteeredSteps(W, 2, 0.1, far(math.nan)), FINE),
        Query(SteeredSteps(W, 2, 0.1, far(-math.inf)), FINE),
    ],
    "steps": [
        Query(LocalSteps(W, 0, 0.1), FINE),
        Query(SteeredSteps(W, 0, 0.1, W), FINE),
        Query(SteeredSteps(W, 2, -0.1, W), FINE),
        Query(LocalSteps(W, -1, 0.1), FINE),
        Query(LocalSteps(W, 2, 0.0), FINE),
        Query(LocalSteps(W, 2, math.nan), FINE),
        Query(LocalSteps(W, 2, torch.tensor([[-0.1]])), FINE),
    ],
    "clip": [
        Query(Grad(W), FINE.clipped(-1.0)),
        Query(Grad(W), FINE.clipped(math.nan)),
        Query(Grad(W), FINE.clipped(torch.tensor([[math.nan]]))),
    ],
    "noise": [
        Query(Grad(W), replace(FINE, noise_multiplier=-1.0)),
        Query(Grad(W), replace(FINE, noise_multiplier=math.nan)),
        Query(Grad(W), replace(FINE, noise_multiplier=torch.tensor([[1.0, -1e-9]]))),
    ],
    "batch": [
        Query(Grad(W), replace(FINE, sampling=DisjointBatches(3, 3))),
        Query(Grad(W), replace(FINE, sampling=DisjointBatches(3, -1))),
        Query(Grad(W), replace(FINE, sampling=DisjointBatches(7, 0))),
        Query(Grad(W), replace(FINE, sampling=DisjointBatches(0, 0))),
        Query(Grad(W), replace(FINE, sampling=Poisson(0.0))),
        Query(Grad(W), replace(FINE, sampling=Poisson(1.5))),
        Query(Grad(W), replace(FINE, sampling=Poisson(math.nan))),
        Query(Grad(W), replace(FINE, sampling=Poisson(0.05))),
        Query(Grad(W), replace(FINE, sampling=WithoutReplacement(-0.5))),
        Query(Grad(W), replace(FINE, sampling=WithoutReplacement(0.01))),
    ],
}
CASES = [
    pytest.param(code, query, id=f"{code}-{i}")
    for code, queries in SENSELESS.items()
    for i, query in enumerate(queries)
]


@pytest.mark.parametrize(("code", "query"), CASES)
def test_what_no_policy_could_allow_is_refused_by_a_fixed_code_before_it_is_charged(code, query):
    diary = Diary()
    before = diary.spent()
    with pytest.raises(Refused) as refusal:
        gate_of(diary).answer(query, (0, 1))
    assert refusal.value.code == str(refusal.value) == code
    assert diary.lines == []
    assert diary.spent() == before


@pytest.mark.parametrize(
    "query",
    [
        Query(Grad(W), FINE),
        Query(GradDiff(W, W + 1), FINE.clipped(0.0)),
        Query(LocalSteps(W, 3, torch.tensor([[0.1]])), FINE),
        Query(SteeredSteps(W, 3, 0.1, W.double()), FINE),
        Query(Grad(torch.zeros(3, DIM)), FINE.clipped(torch.ones(3, 1))),
        Query(Grad(W), replace(FINE, sampling=DisjointBatches(6, 5))),
        Query(Grad(W), replace(FINE, sampling=Poisson(1.0))),
        Query(Grad(W), replace(FINE, sampling=WithoutReplacement(0.5))),
    ],
    ids=lambda q: f"{type(q.statistic).__name__}-{type(q.mechanism.sampling).__name__}",
)
def test_what_makes_sense_is_not_refused(query):
    check(query, DIM, COUNTS, runs=query.statistic.shape[0])


def test_it_charges_before_it_computes():
    diary = Diary()
    gate_of(diary).answer(Query(Grad(W), FINE), (1,))
    gate_of(diary).answer(Query(LocalSteps(W, 5, 0.1), FINE), (0, 1))
    gate_of(diary).answer(Query(SteeredSteps(W, 4, 0.1, W), FINE), (0,))
    assert diary.lines == [
        ("charge", 1, (1,)),
        ("compute", "Grad", (1,)),
        ("charge", 5, (0, 1)),
        ("compute", "LocalSteps", (0, 1)),
        ("charge", 4, (0,)),
        ("compute", "SteeredSteps", (0,)),
    ]


def test_a_failure_after_the_charge_leaves_the_charge():
    diary = Diary(budget=5.0, fails=True)
    with pytest.raises(RuntimeError):
        gate_of(diary).answer(Query(Grad(W), FINE), (0,))
    assert diary.spent()[0][0] > 0 == diary.spent()[0][1]


def test_a_query_past_the_budget_is_refused_without_touching_records_and_leaves_the_ledger_as_it_was():  # noqa: E501
    diary = Diary(budget=1.0)
    gate = gate_of(diary)
    gate.answer(Query(Grad(W), replace(FINE, noise_multiplier=10.0)), (0, 1))
    before, lines = diary.spent(), list(diary.lines)
    with pytest.raises(Refused, match=r"^budget$"):
        gate.answer(Query(Grad(W), replace(FINE, noise_multiplier=1.0)), (0, 1))
    assert diary.spent() == before
    assert diary.lines == lines
    gate.answer(Query(Grad(W), replace(FINE, noise_multiplier=10.0)), (0, 1))


def test_no_finite_budget_lets_an_answer_without_noise_out():
    gate, ledger = real_gate(1e6)
    with pytest.raises(Refused, match="budget"):
        gate.answer(Query(Grad(W), replace(FINE, noise_multiplier=0.0)), (0, 1))
    assert (ledger.epsilon() == 0).all()


def test_a_release_says_what_it_cost_and_who_answered():
    gate, ledger = real_gate(5.0)
    query = Query(Grad(W), FINE)
    release = gate.answer(query, [1])
    assert isinstance(release, Release)
    assert release.silos == (1,)
    assert release.value.shape == (1, 1, DIM)
    assert (release.event.sampling, release.event.noise_multiplier, release.event.count) == (
        FullBatch(),
        2.0,
        1,
    )
    assert ledger.epsilon()[0, 1] > 0 == ledger.epsilon()[0, 0]


def test_bad_records_yield_a_normal_release():
    hole = np.full((6, 3), np.nan)
    huge = np.full((9, 3), 1e30)
    gate, _ = real_gate(5.0, records=Records.of([(hole, np.zeros(6)), (huge, np.full(9, np.inf))]))
    release = gate.answer(Query(Grad(W + 1), FINE), (0, 1))
    assert bool(torch.isfinite(release.value).all())


# --- what a hostile server might try -------------------------------------------------------------


def test_a_silo_named_twice_in_one_query_does_not_answer_twice_for_one_price():
    """Two draws of noise on one mean are worth two releases: refuse, or charge for both."""
    gate, ledger = real_gate(50.0)
    try:
        answers = gate.answer(Query(Grad(W), FINE), (0, 0)).value.shape[1]
    except (Refused, BadInput):
        return
    once, price = real_gate(50.0)
    for _ in range(answers):
        once.answer(Query(Grad(W), FINE), (0,))
    assert ledger.epsilon()[0, 0] == pytest.approx(price.epsilon()[0, 0])


def test_a_gate_for_one_run_does_not_answer_two_points_under_one_draw_of_noise():
    """The difference of the two answers would be free of noise, and the ledger would have been
    charged once.
    """
    gate, ledger = real_gate(50.0)
    with pytest.raises(Refused, match="shape"):
        gate.answer(Query(Grad(torch.stack([W[0], W[0] + 1])), FINE), (0, 1))
    assert (ledger.epsilon() == 0).all()


@pytest.mark.parametrize(
    "clip",
    [torch.tensor([[1.0, 1e-9]]), torch.tensor([1.0, 1e-9]), torch.tensor([[1.0], [1e-9]])],
    ids=["row", "flat", "column"],
)
def test_a_clip_of_another_shape_than_one_per_run_is_refused(clip):
    """Records clipped at one entry and noise scaled by another would be an answer almost without
    noise.
    """
    diary = Diary()
    with pytest.raises(Refused, match="clip"):
        gate_of(diary).answer(Query(Grad(W), FINE.clipped(clip)), (0, 1))
    assert diary.lines == []


@pytest.mark.parametrize(
    "statistic",
    [
        Histogram(torch.tensor([-1.0, 0.0, 1.0]), 3),
        Moments(torch.full((3,), -1.0), torch.full((3,), 1.0)),
    ],
    ids=["h", "m"],
)
@pytest.mark.parametrize("clip", [0.0, 1e-6, 1.0])
def test_feature_statistics_are_not_released_at_a_clip_below_their_own_norm(statistic, clip):
    """Nobody clips a histogram: noise at a smaller clip than sqrt(features), or sqrt(2 features),
    would not cover a record.
    """
    gate, ledger = real_gate(50.0)
    with pytest.raises(Refused, match="clip"):
        gate.answer(Query(statistic, FINE.clipped(clip)), (0, 1))
    assert (ledger.epsilon() == 0).all()


@pytest.mark.parametrize(
    "statistic",
    [
        Histogram(torch.tensor([-1.0, 0.0, 1.0]), 1),
        Moments(torch.tensor([-1.0]), torch.tensor([1.0])),
    ],
    ids=["h", "m"],
)
def test_a_query_cannot_understate_the_number_of_features_and_so_their_norm(statistic):
    """Silos have three features here: a record's norm is sqrt(3) times what a query about one
    feature says.
    """
    gate, ledger = real_gate(50.0)
    with pytest.raises(Refused, match=r"shape|clip"):
        gate.answer(Query(statistic, FINE.clipped(2**0.5)), (0, 1))
    assert (ledger.epsilon() == 0).all()


@pytest.mark.parametrize(
    "sampling", [Poisson(0.5), WithoutReplacement(0.5), DisjointBatches(2)], ids=str
)
def test_feature_statistics_on_other_than_full_batches_are_refused_before_the_charge(sampling):
    diary = Diary()
    with pytest.raises(Refused, match="batch"):
        gate_of(diary).answer(
            Query(Histogram(torch.tensor([0.0]), 3), Gaussian("ranges", 2.0, 5.0, sampling)), (0, 1)
        )
    assert diary.lines == []


# --- the only way out ----------------------------------------------------------------------------


def releases_made(source):
    """Lines of calls to Release, whatever the module calls it by."""
    tree = ast.parse(source)
    names = {"Release"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {
                alias.asname for alias in node.names if alias.name == "Release" and alias.asname
            }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id in names]
    return named + [
        c.lineno for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "Release"
    ]


def test_only_the_gate_makes_a_release():
    """In all of the source but the audit's mutants, which are gates broken on purpose and never
    shipped as anything else.
    """
    root = Path(silodp.__file__).parent
    makers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if releases_made(path.read_text())
    }
    assert makers == {"silo/gate.py"}


@pytest.mark.parametrize(
    "source",
    [
        "Release(v, s, e)",
        "query.Release(v, s, e)",
        "from silodp.core.query import Release as Note\nNote(v, s, e)",
    ],
)
def test_the_scan_sees_a_release_made_elsewhere(source):
    assert releases_made(source)


# --- one thing under two names -------------------------------------------------------------------


@pytest.mark.parametrize("silos", [(0, 1, -1), (-1,), (False, True), (2,), (0, 1.0)], ids=str)
def test_a_silo_has_one_name_only(silos):
    """-1 or True would be a second name for a silo that answers, and is charged, once."""
    diary = Diary()
    with pytest.raises(Refused, match="shape"):
        gate_of(diary).answer(Query(Grad(W), FINE), silos)
    assert diary.lines == []


@pytest.mark.parametrize(
    "sampling",
    [
        DisjointBatches(2, 0.0),
        DisjointBatches(2, False),
        DisjointBatches(2.0, 0),
        DisjointBatches(2, 0, 1),
    ],  # type: ignore[arg-type]
    ids=str,
)
def test_a_batch_has_one_name_only(sampling):
    """The ledger would take 0.0 for another batch than 0, and the answerer for the same."""
    diary = Diary()
    with pytest.raises(Refused, match="batch"):
        gate_of(diary).answer(Query(Grad(W), replace(FINE, sampling=sampling)), (0,))
    assert diary.lines == []


@pytest.mark.parametrize(
    "statistic",
    [
        Moments(torch.zeros(3, 1, 1, 3), torch.ones(3)),
        Moments(torch.zeros(3), torch.ones(3, 1)),
        Histogram(torch.zeros(2, 2), 3),
    ],
    ids=["deep", "column", "edges"],
)
def test_feature_statistics_take_plain_vectors(statistic):
    """With more axes a mean over records would become one over silos."""
    gate, ledger = real_gate(50.0)
    with pytest.raises(Refused, match="shape"):
        gate.answer(Query(statistic, FINE.clipped(10.0)), (0,))
    assert (ledger.epsilon() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_points_of_low_precision_are_refused(dtype):
    """A mean in bfloat16 moves by more than its sensitivity when one record is replaced."""
    with pytest.raises(Refused, match="shape"):
        gate_of(Diary()).answer(Query(Grad(W.to(dtype)), FINE), (0,))
