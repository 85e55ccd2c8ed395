"""Scores, class counts and missing rates at the gate: what one record can do to them, what they
cost, and what is refused.
"""

import contextlib
import hashlib
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from silodp.core.errors import BadInput, Refused
from silodp.core.lattice import lattice_step, noise_scale
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget, gdp_mu
from silodp.core.problem import losses
from silodp.core.problem.losses import cross_entropy, logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import Envelope, decode_query, encode_query
from silodp.core.query import Query
from silodp.core.sampling import Poisson
from silodp.core.statistics import ClassCounts, Grad, GroupScore, MissingRates, Score
from silodp.silo.answer import exact, lattice, slots
from silodp.silo.answer.exact import Exact, levelled
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.heldout import held_out, split_records
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing import check_statistic

FEATURES, N = 3, 40
BAD = (math.nan, math.inf, -math.inf, 3e38, -3e38)
PROBLEMS = {
    "logit": Problem(nn.Linear(FEATURES, 1), logistic),
    "two": Problem(nn.Linear(FEATURES, 2), cross_entropy),
    "weighted": Problem(nn.Linear(FEATURES, 2), losses.Weighted(cross_entropy, (1.0, 6.0))),
    "four": Problem(nn.Linear(FEATURES, 4), cross_entropy),
    "number": Problem(nn.Linear(FEATURES, 1), squared_error),
    "count": Problem(nn.Linear(FEATURES, 1), losses.Poisson(9.0)),
    "steps": Problem(nn.Linear(FEATURES, 3), losses.Ordinal(4)),
    "times": Problem(nn.Linear(FEATURES, 3), losses.Hazard(3)),
}
NUMBERS = ("number", "count")
BINS = {"logit": 5, "two": 5, "weighted": 5, "four": 4, "steps": 4, "times": 5}
LISTED = {"number": 4, "count": 5}
EDGES = torch.tensor([-1.5, -0.5, 0.25, 1.0], dtype=torch.float64)


def scored(name, cap, w=None):
    """Return the question with every number of the task's list, and bins where it has some."""
    bins = BINS.get(name, 0)
    edges = EDGES if bins == 5 else EDGES[:0]
    return Score(point(name) if w is None else w, bins, cap, LISTED.get(name, 2), edges)


def point(name, scale=1.0):
    return scale * PROBLEMS[name].initial([1])


def some_records(name):
    """Ordinary and hostile records: values that are huge or not finite, labels that do not
    exist.
    """
    random = torch.Generator().manual_seed(4)
    rows = [torch.randn(FEATURES, generator=random) * 5 for _ in range(6)]
    rows += [torch.full((FEATURES,), value) for value in (0.0, *BAD)] + [
        torch.tensor([math.nan, 1.0, 2.0])
    ]
    labels = (
        [0.0, float(point(name)[0, -1]), 1e30, -3.0, math.nan, math.inf]
        if name in NUMBERS
        else [0, 1, 3, -7, 2**62]
    )
    return [(x, torch.tensor(y)) for x in rows for y in labels]


def deployed(problem, share=0.0):
    return lambda records: Exact(
        problem, records, partition=lambda *_: np.arange(records.counts[0]), held_out_share=share
    )


@pytest.fixture
def silent(monkeypatch):
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda scale, size: np.zeros(size, np.int64))


class Quiet(Simulated):
    def _noisy(self, mean, mechanism, silos):
        return mean


def whole_silo(problem, scored):
    """The deployed answerer with all records in the part that is asked about, so that brute force
    over one position says all.
    """

    def make(records):
        asked = Exact(problem, records, partition=lambda *_: np.arange(records.counts[0]))
        asked._held = np.full(records.counts[0], scored)
        return asked

    return make


STATISTICS = {
    **{f"score {name}": (name, lambda name=name: scored(name, 2.0)) for name in PROBLEMS},
    "score of fewer numbers": ("count", lambda: Score(point("count"), 0, 2.0, 2)),
    "score of one number and cells": ("four", lambda: Score(point("four"), 4, 2.0, 1)),
    "score, huge w": ("logit", lambda: Score(point("logit", 1e30), 5, 1e-300)),
    "classes": ("four", lambda: ClassCounts(4)),
    "groups": ("four", lambda: GroupScore(point("four"), 0, FEATURES, 0)),
    "groups, yes or no, with gaps": ("logit", lambda: GroupScore(point("logit"), 1, 1, 1)),
    "missing": ("two", lambda: MissingRates(FEATURES)),
}


@pytest.mark.parametrize("case", STATISTICS)
def test_one_replaced_record_moves_a_sum_by_at_most_two_clips_and_by_as_much(case, silent):
    name, make = STATISTICS[case]
    problem, statistic = PROBLEMS[name], make()
    for answerer in (
        lambda records: Quiet(problem, records, [0]),
        whole_silo(problem, statistic.on_held_out),
    ):
        # no pair of records is far apart in all numbers: the larger one is, the smaller the other
        reaches = 0.85 if isinstance(statistic, Score) else 0.99
        check_statistic(statistic, some_records(name), answerer, dim=problem.dim, reaches=reaches)


def test_a_clip_of_half_the_reach_is_all_that_is_needed_and_no_less_is_taken():
    assert scored("two", 1.0).norm == 1.0  # loss, risk and a cell: 1 + 1 + 2
    assert Score(point("four"), 4, 1.0, 1).norm == pytest.approx(math.sqrt(3) / 2)
    assert scored("count", 1.0).norm == pytest.approx(math.sqrt(5) / 2)
    assert Score(point("four"), 0, 1.0).norm == pytest.approx(math.sqrt(2) / 2)
    assert ClassCounts(4).norm == pytest.approx(math.sqrt(2) / 2)
    assert GroupScore(W, 0, 3, 0).norm == pytest.approx(math.sqrt(2) / 2)
    for numbers in (1, 2, 3, 7, 30, 784):
        norm = MissingRates(numbers).norm
        assert (
            4 * Fraction(norm) ** 2 >= numbers > 4 * Fraction(math.nextafter(norm, 0)) ** 2
        )  # rounded up, in exact arithmetic


def test_a_row_whose_cells_sum_to_more_than_one_or_are_below_zero_is_no_row():
    shared = [0.5, 0.5, 0.25, 0.25]  # of a person with several rows
    rows = [
        [0.5, 1, 0, 0],
        [0.5, 1, 1, 0],
        shared,
        [2.0, 1, 0, 0],
        [-0.5, 0, 0, 0],
        [0.5, 0, 0, 0],
        [0.5, 1, -0.5, 0.5],
        [0.5, 0.5, 0.5, 0.1],
    ]
    kept = levelled(torch.tensor(rows, dtype=torch.float64), 1, 2.0**-18).double() * 2.0**-18
    assert kept.tolist() == [
        [0.5, 1, 0, 0],
        [0] * 4,
        shared,
        [0] * 4,
        [0] * 4,
        [0.5, 0, 0, 0],
        [0] * 4,
        [0] * 4,
    ]


@pytest.mark.parametrize("rows", range(1, 21))
def test_a_persons_cells_are_never_rounded_past_one(rows):
    """Each of so many rows in a cell of its own: rounded to the nearest, a third and two thirds
    would each go up.
    """
    person = torch.full((1, rows), 1 / rows, dtype=torch.float64)
    whole = levelled(person, 0, 2.0**-16)
    assert 2**16 - rows <= int(whole.sum()) <= 2**16


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=64, allow_nan=True, allow_infinity=True), min_size=6, max_size=6),
    st.integers(0, 6),
)
def test_whatever_the_floats_a_row_on_the_lattice_has_numbers_and_cells_that_sum_to_one_at_most(
    row, numbers
):
    gamma = 2.0**-18
    whole = levelled(torch.tensor([row], dtype=torch.float64), numbers, gamma)[0].tolist()
    assert all(0 <= k <= 2**18 for k in whole[:numbers])
    assert all(k >= 0 for k in whole[numbers:])
    assert sum(whole[numbers:]) <= 2**18


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_score_is_what_a_loop_over_records_finds(name, silent):
    problem, w, cap, bins = PROBLEMS[name], point(name), 1.5, BINS.get(name, 0)
    statistic = scored(name, cap)
    random = np.random.default_rng(3)
    x = random.normal(size=(N, FEATURES)).astype(np.float32)
    y = (
        random.normal(size=N).astype(np.float32)
        if name in NUMBERS
        else random.integers(0, {"four": 4, "steps": 4, "times": 7}.get(name, 2), N)
    )
    if name == "count":
        y = np.abs(np.round(3 * y))
    wanted = np.zeros(statistic.shape[-1])
    for xi, yi in zip(x, y, strict=True):
        output = (
            problem.outputs(w.double(), torch.tensor(xi[None], dtype=torch.float64))[0, 0]
            .detach()
            .numpy()
        )
        if name in NUMBERS:
            rate = output[0] if name == "number" else min(math.exp(output[0]), 9.0)
            error = min(abs(rate - yi), cap) / cap
            wanted[:2] += error**2, error
            if name == "number":
                inside = min(max(yi, -1.0), 1.0)
                wanted[2:] += (inside + 1) / 2, inside**2
                continue
            inside = min(yi, 9.0)
            itself = inside * math.log(max(inside, 1.0))
            deviance = 2 * (itself - inside * math.log(rate) - inside + rate)
            wanted[2:] += (
                inside / 9,
                deviance / (2 * (9 * math.log(9) - 8)),
                itself / (9 * math.log(9)),
            )
            continue
        if name == "times":
            hazards = 1 / (1 + np.exp(-output))
            last, event = divmod(int(yi), 2)
            loss = -np.log(1 - hazards[:last]).sum()
            loss -= math.log(hazards[last]) if event else 0.0
            risk = 1 - np.prod(1 - hazards[:2])
            known = event or last > 1
            outcome = int(last <= 1)
            wanted[:2] += min(loss, cap) / cap, (risk - outcome + 1) / 2 if known else 0.5
            if known:
                place = np.searchsorted(EDGES.numpy(), math.log(risk / (1 - risk)), side="right")
                wanted[2 + outcome * bins + place] += 1
            continue
        if name == "steps":
            above = 1 / (1 + np.exp(-output))
            loss = -sum(np.log(p if yi > k else 1 - p) for k, p in enumerate(above))
            chances = -np.diff([1.0, *np.minimum.accumulate(above), 0.0])
            right = chances.argmax() == yi
            wanted[:2] += min(loss, cap) / cap, (chances.max() - right + 1) / 2
            wanted[2 + right * bins + yi] += 1
            continue
        logits = np.array([0.0, output[0]]) if name == "logit" else output
        chances = np.exp(logits) / np.exp(logits).sum()
        loss, right = (
            -np.log(chances[yi]) * (6.0 if name == "weighted" and yi else 1.0),
            logits.argmax() == yi,
        )
        wanted[0] += min(loss, cap) / cap
        if name == "four":
            wanted[1] += (chances.max() - right + 1) / 2
            wanted[2 + right * bins + yi] += 1
            continue
        risk = chances[1] / (chances[1] + 6 * chances[0]) if name == "weighted" else chances[1]
        wanted[1] += (risk - yi + 1) / 2
        place = np.searchsorted(EDGES.numpy(), math.log(risk / (1 - risk)), side="right")
        wanted[2 + yi * bins + place] += 1
    query = Query(statistic, Gaussian("score", float(statistic.norm), 1.0))
    data = Records.of([(x, y)])
    for answerer in (Quiet(problem, data, [0]), whole_silo(problem, True)(data)):
        np.testing.assert_allclose(answerer.answer(query, [0])[0, 0].numpy(), wanted / N, atol=3e-6)


def test_several_points_are_scored_as_one_by_one():
    problem, (x, y) = PROBLEMS["two"], data_of_two_classes()
    points = torch.cat([point("two"), -point("two")])
    both = Quiet(problem, Records.of([(x, y)] * 2), [0, 1]).answer(
        Query(Score(points, 4, 1.0), Gaussian("score", 1.0, 1.0)), [0, 1]
    )
    assert both.shape == (2, 2, 10)
    for j in range(2):
        alone = Quiet(problem, Records.of([(x, y)]), [0]).answer(
            Query(Score(points[j : j + 1], 4, 1.0), Gaussian("score", 1.0, 1.0)), [0]
        )
        assert torch.allclose(both[j], alone[0].expand(2, -1))


class Mixing(nn.Module):
    """A user's own model whose output of a record depends on the others of its batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2)

    def forward(self, x):
        return self.inner(x - x.mean(0))


def test_a_model_that_mixes_records_cannot_mix_those_that_are_scored():
    problem = Problem(Mixing(), cross_entropy)
    rows = Score(problem.initial([0]), 3, 1e6).rows(problem, 0)  # a cap that hides no loss
    (x, y), (other, _) = data_of_two_classes(), data_of_two_classes(seed=8)
    x, other, y = torch.tensor(x), torch.tensor(other), torch.tensor(y)
    mixed = torch.cat([x[:1], other[1:]])
    assert torch.equal(rows(x, y)[0], rows(mixed, y)[0])


# --- held out ------------------------------------------------------------------------------------


def data_of_two_classes(n=N, seed=5):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, FEATURES)).astype(np.float32), random.integers(0, 2, n)


def test_the_split_follows_from_position_and_n_alone():
    """The figure is fixed, so that no version of anything moves a record; parts are even along an
    ordered file.
    """
    assert hashlib.sha256(held_out(1000, 0.2).tobytes()).hexdigest()[:16] == "b281042109938319"
    for n, share in ((5, 0.2), (100, 0.25), (999, 0.3)):
        assert held_out(n, share).sum() == int(share * n)
    assert all(10 <= part.sum() <= 35 for part in np.array_split(held_out(1000, 0.2), 10))
    with pytest.raises(BadInput, match="held-out share"):
        held_out(10, 1.0)


def test_a_replaced_record_moves_no_other_between_the_parts():
    x, y = data_of_two_classes()
    other = x.copy()
    other[7] = 1e9
    parts, changed = (split_records(Records.of([(v, y)]), 0.25) for v in (x, other))
    assert [p.counts for p in parts] == [(30,), (10,)]
    moved = [int((a.x != b.x).any(-1).sum()) for a, b in zip(parts, changed, strict=True)]
    assert sorted(moved) == [0, 1]


def test_a_split_that_leaves_a_part_empty_is_refused():
    with pytest.raises(BadInput, match="silo-0 with 0 held-out"):
        split_records(Records.of([data_of_two_classes()]), 0.01)


def test_training_never_sees_held_out_records_and_a_score_sees_no_others(silent):
    """A deployed silo whose held-out records change: gradients stay to the last bit; and the
    reverse for scores.
    """
    problem, w, held = PROBLEMS["two"], point("two"), held_out(N, 0.25)
    x, y = data_of_two_classes()
    asked = {}
    for where, mask in (("none", np.zeros(N, bool)), ("held", held), ("train", ~held)):
        changed = np.where(mask[:, None], -3 * x, x)
        gate = deployed(problem, 0.25)(Records.of([(changed, y)]))
        asked[where] = [
            gate.answer(Query(s, Gaussian("a", 1.0, 1.0)), [0])
            for s in (Grad(w), Score(w, 4, 1.0), GroupScore(w, 0, 2, 0))
        ]
    assert torch.equal(asked["none"][0], asked["held"][0])
    assert not torch.equal(asked["none"][0], asked["train"][0])
    for scored in (1, 2):
        assert torch.equal(asked["none"][scored], asked["train"][scored])
        assert not torch.equal(asked["none"][scored], asked["held"][scored])


def test_a_mean_is_over_its_part_and_its_noise_is_for_the_sum_of_all(monkeypatch, silent):
    problem, w, scales = PROBLEMS["two"], point("two"), []
    x, y = data_of_two_classes()
    gate = deployed(problem, 0.25)(Records.of([(x, y)]))
    value = gate.answer(Query(Score(w, 4, 1.0), Gaussian("a", 1.0, 1.0)), [0])[0, 0]
    assert float(value[2:].sum()) == pytest.approx(1.0)
    full = deployed(problem)(Records.of([(x[~held_out(N, 0.25)], y[~held_out(N, 0.25)])]))
    query = Query(Grad(w), Gaussian("a", 1.0, 1.0))
    assert torch.allclose(gate.answer(query, [0]), full.answer(query, [0]), atol=1e-12)
    monkeypatch.setattr(
        lattice,
        "rounded_gaussian",
        lambda scale, size: scales.append(scale) or np.zeros(size, np.int64),
    )
    for asked in (query, Query(Score(w, 4, 1.0), Gaussian("a", 1.0, 3.0))):
        gate.answer(asked, [0])
        assert scales[-1] == noise_scale(
            asked.mechanism.noise_multiplier,
            1.0,
            lattice_step(1.0, asked.statistic.shape[-1]),
        )


@pytest.mark.parametrize(("features", "hidden"), [(64, 2), (2, 64)])
def test_a_score_takes_no_more_records_at_once_than_memory_has_room_for(
    monkeypatch, features, hidden
):
    """Room for 2^10 numbers: its own row has two, but a record and the model have many more."""
    problem = Problem(
        nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 4)), cross_entropy
    )
    seen, computed = [], slots.computed
    monkeypatch.setattr(slots, "CHUNK", 2**10)
    monkeypatch.setattr(
        exact, "computed", lambda make, x, *rest: seen.append(len(x)) or computed(make, x, *rest)
    )
    gate = deployed(problem, 0.5)(
        Records.of([(np.zeros((200, features), np.float32), np.zeros(200, np.int64))])
    )
    gate.answer(asking(Score(problem.initial([0]), 0, 1.0)), [0])
    assert sum(seen) == 200
    assert max(seen) * max(features, problem.dim) <= 2**10


# --- price and refusals --------------------------------------------------------------------------


def simulated_gate(budget=math.inf, name="two"):
    x, y = data_of_two_classes()
    data, problem = Records.of([(x, y)]), PROBLEMS[name]
    ledger = MemoryLedger(GDP(), Budget(budget, 1e-6), data.counts)
    return Gate(Simulated(problem, data, [0]), ledger, dim=problem.dim, counts=data.counts), ledger


def asking(statistic, clip=None, noise=4.0, **rest):
    return Query(
        statistic, Gaussian("score", statistic.norm if clip is None else clip, noise, **rest)
    )


def test_a_score_costs_what_any_gaussian_release_costs_each_time():
    gate, ledger = simulated_gate()
    for times, statistic in enumerate(
        [Score(point("two"), 4, 1.0)] * 2 + [ClassCounts(2), MissingRates(FEATURES)], 1
    ):
        gate.answer(asking(statistic), [0])
        assert ledger.rule.total(ledger._buckets).item() == pytest.approx(times / 16)


def test_repeated_evaluation_ends_with_the_budget():
    gate, _ = simulated_gate(budget=1.0)
    answers = []
    with contextlib.suppress(Refused):
        while len(answers) < 100:
            answers.append(gate.answer(asking(Score(point("two"), 4, 1.0), noise=20.0), [0]))
    assert len(answers) == int(gdp_mu(Budget(1.0, 1e-6)) ** 2 * 400) > 10


W = point("two")
HOSTILE = {
    "w with NaN": (asking(Score(torch.full_like(W, math.nan), 4, 1.0)), "not-finite"),
    "w with inf": (asking(Score(torch.full_like(W, math.inf), 4, 1.0)), "not-finite"),
    "w of another shape": (asking(Score(W[:, :-1], 4, 1.0)), "shape"),
    "two points": (asking(Score(torch.cat([W, W]), 4, 1.0)), "shape"),
    "w of integers": (asking(Score(W.long(), 4, 1.0)), "shape"),
    "513 bins": (asking(Score(W, 513, 1.0)), "shape"),
    "-1 bins": (asking(Score(W, -1, 1.0), clip=1.0), "shape"),
    "bins that are no integer": (asking(Score(W, 4.0, 1.0)), "shape"),
    "no numbers": (asking(Score(W, 4, 1.0, 0)), "shape"),
    "6 numbers": (asking(Score(W, 4, 1.0, 6)), "shape"),
    "numbers that are no integer": (asking(Score(W, 4, 1.0, 2.0)), "shape"),
    "too few edges": (asking(Score(W, 4, 1.0, 2, EDGES[:2])), "shape"),
    "edges without bins": (asking(Score(W, 0, 1.0, 2, EDGES)), "shape"),
    "edges out of order": (asking(Score(W, 5, 1.0, 2, EDGES.flip(0))), "shape"),
    "edges in a table": (asking(Score(W, 5, 1.0, 2, EDGES[None])), "shape"),
    "edges with NaN": (asking(Score(W, 5, 1.0, 2, EDGES * math.nan)), "not-finite"),
    "cap 0": (asking(Score(W, 4, 0.0)), "clip"),
    "cap NaN": (asking(Score(W, 4, math.nan)), "clip"),
    "cap inf": (asking(Score(W, 4, math.inf)), "clip"),
    "cap -1": (asking(Score(W, 4, -1.0)), "clip"),
    "a clip below the reach": (asking(Score(W, 4, 1.0), clip=0.99), "clip"),
    "a clip just below the reach": (
        asking(ClassCounts(2), clip=math.sqrt(2) / 2 * (1 - 1e-9)),
        "clip",
    ),
    "a clip of zero": (asking(Score(W, 4, 1.0), clip=0.0), "clip"),
    "a huge clip": (asking(Score(W, 4, 1.0), clip=1e6), "clip"),
    "a part of the records": (asking(Score(W, 4, 1.0), sampling=Poisson(0.5)), "batch"),
    "2^16 + 1 classes": (asking(ClassCounts(2**16 + 1)), "shape"),
    "1 class": (asking(ClassCounts(1)), "shape"),
    "-2 classes": (asking(ClassCounts(-2), clip=1.0), "shape"),
    "another number of features": (asking(MissingRates(FEATURES + 1)), "shape"),
    "no features": (asking(MissingRates(0), clip=1.0), "shape"),
    "513 groups": (asking(GroupScore(W, 0, 513, 0)), "shape"),
    "no groups": (asking(GroupScore(W, 0, 0, 0)), "shape"),
    "groups from below the first feature": (asking(GroupScore(W, -1, 2, 0)), "shape"),
    "groups with two places for gaps": (asking(GroupScore(W, 0, 2, 2)), "shape"),
    "groups that are no integer": (asking(GroupScore(W, 0, 2.0, 0)), "shape"),
    "groups of a w with NaN": (
        asking(GroupScore(torch.full_like(W, math.nan), 0, 2, 0)),
        "not-finite",
    ),
    "groups at another clip": (asking(GroupScore(W, 0, 2, 0), clip=0.5), "clip"),
    "negative noise": (asking(ClassCounts(2), noise=-1.0), "noise"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_questions_are_refused_before_any_charge(case):
    query, code = HOSTILE[case]
    gate, ledger = simulated_gate()
    with pytest.raises(Refused) as refusal:
        gate.answer(query, [0])
    assert refusal.value.code == code
    assert not ledger._buckets


def test_a_deployed_silo_without_held_out_records_refuses_scores_and_one_ulp_of_clip_too_little(
    silent,
):
    data = Records.of([data_of_two_classes()])
    with pytest.raises(Refused, match="batch"):
        deployed(PROBLEMS["two"])(data).check(asking(Score(W, 4, 1.0)))
    with pytest.raises(Refused, match="batch"):
        deployed(PROBLEMS["two"])(data).check(asking(GroupScore(W, 0, 2, 0)))
    gate = deployed(PROBLEMS["two"], 0.25)(data)
    for statistic in (
        Score(W, 4, 1.0),
        Score(W, 0, 1.0),
        GroupScore(W, 0, 2, 1),
        ClassCounts(2),
        MissingRates(FEATURES),
    ):
        gate.check(asking(statistic))
        short = asking(statistic, clip=math.nextafter(statistic.norm, 0))
        with pytest.raises(Refused, match="clip"):
            gate.check(short)
    for first, features, indicator in (
        (0, 4, 0),
        (3, 1, 0),
        (0, 3, 1),
        (2**53, 1, 0),
    ):  # beyond the silo's features
        with pytest.raises(Refused, match="shape"):
            gate.check(asking(GroupScore(W, first, features, indicator)))


def test_a_query_survives_its_bytes():
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    for statistic in (
        Score(W, 4, 0.1),
        scored("two", 0.1),
        GroupScore(W, 3, 2, 1),
        ClassCounts(3),
        MissingRates(5),
    ):
        frame = encode_query(Envelope("silo", "run", "q", "0" * 64, asking(statistic)), key)
        got = decode_query(frame, limit=10**6)[0].query
        assert type(got.statistic) is type(statistic)
        assert got.statistic.shape == statistic.shape
        assert all(
            torch.equal(torch.as_tensor(v), torch.as_tensor(getattr(got.statistic, name)))
            for name, v in vars(statistic).items()
        )
    with pytest.raises(BadInput):
        encode_query(Envelope("silo", "run", "q", "0" * 64, asking(Score(W, 4, math.nan))), key)


def test_a_w_made_to_isolate_one_record_tells_no_more_than_its_price():
    """The server knows all other records, and builds w so that only the target's cell and loss
    move.

    600 releases of each neighbour, at noise multiplier 1: projected on the true difference they are
    N(0, 1) apart by mu = 1 at most. The difference is sqrt(3.25) long, of 2 that are priced: mu is
    0.90. The estimate has a standard error of sqrt(2 / 600) = 0.058; it must lie in 0.90 +- 0.3
    (5 sigma), so that the noise is neither too little nor wasted.
    """
    problem = PROBLEMS["logit"]
    x, y = np.zeros((8, FEATURES), np.float32), np.zeros(8, np.int64)
    x[:, 0] = -30.0
    near, far = (x.copy(), y.copy()), (x.copy(), y.copy())
    target = int(np.flatnonzero(held_out(8, 0.5))[0])
    far[0][target, 0], far[1][target] = -30.0, 1  # as sure as can be, and wrong
    w = torch.zeros(1, problem.dim)
    w[0, 0] = 1.0
    query = asking(Score(w, 5, 1.0, 2, EDGES), noise=1.0)
    draws = []
    for data in (near, far):
        gate = deployed(problem, 0.5)(Records.of([data]))
        gate.check(query)
        draws.append(torch.stack([gate.answer(query, [0])[0, 0] for _ in range(600)]).numpy())
    direction = np.zeros(12)
    # the loss rises, the risk becomes too low, and one cell becomes another
    direction[[0, 1, 2, 7]] = (1, -0.5, -1, 1)
    apart = (draws[1] - draws[0]) @ direction / np.linalg.norm(direction)
    noise = np.concatenate(
        [d @ direction - (d @ direction).mean() for d in draws]
    ) / np.linalg.norm(direction)
    expected = np.linalg.norm(direction) / 2
    assert float(apart.mean() / noise.std()) == pytest.approx(expected, abs=0.3)


def test_missing_values_are_those_that_were_missing_when_they_were_read(silent):
    x, y = data_of_two_classes()
    x[:10, 0] = np.nan
    x[0, 1] = np.inf
    data = Records.of([(x, y)])
    filled = replace(data, x=data.x.nan_to_num(0.0), missing=data.absent)
    for records in (data, filled):
        for answerer in (
            Quiet(PROBLEMS["two"], records, [0]),
            whole_silo(PROBLEMS["two"], False)(records),
        ):
            value = answerer.answer(asking(MissingRates(FEATURES)), [0])[0, 0]
            np.testing.assert_allclose(value.numpy(), [0.25, 0, 0], atol=1e-9)
    parts = split_records(filled, 0.25)
    assert sum(int(p.absent.sum()) for p in parts) == 10
