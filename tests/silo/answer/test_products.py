"""Sums by exact products: a record's integers are its own, the sum is that of integers, and no
record moves it by more than its bound.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.lattice import lattice_step
from silodp.core.problem.losses import Huber, cross_entropy, logistic
from silodp.core.problem.problem import Problem
from silodp.engine.blocks import MeanPool, Residual
from silodp.silo.answer import factors, products
from silodp.silo.answer.exact import Exact, Gradients
from silodp.silo.answer.products import Products
from silodp.silo.data.records import Records

N, MINE, CLIP = 45, [0, 7, 16, 31, 44], 0.5


def small_network():
    return nn.Sequential(
        *(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(
            Residual(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Tanh()),
            nn.Conv2d(4, 24, 4),
            nn.Flatten(),
            nn.LayerNorm(24),
            nn.Linear(24, 3),
        ),
    )


MODELS = {
    "logistic": (lambda: nn.Sequential(nn.Linear(64, 1)), logistic),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 9), nn.ReLU(inplace=True), nn.Linear(9, 3)),
        cross_entropy,
    ),
    "places": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 32)),
            nn.Linear(32, 20),
            nn.Sigmoid(),
            nn.Flatten(),
            nn.Linear(40, 3),
        ),
        cross_entropy,
    ),
    "network": (small_network, cross_entropy),
}


def problem_of(name: str) -> Problem:
    torch.manual_seed(3)
    model, loss = MODELS[name]
    return Problem(model(), loss)


def records(others: float | None = None) -> Records:
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(N, 64)).astype(np.float32), rng.integers(0, 2, N)
    if others is not None:
        theirs = np.setdiff1d(np.arange(N), MINE)
        x[theirs], y[theirs] = others, 1
    return Records.of([(x, y)])


def points_of(of: Problem) -> list[list[torch.Tensor]]:
    """Gradients and differences at ordinary and at hostile points: layers that cancel, overflow and
    next to nothing.
    """
    w = of.initial([1]).double()
    rng = torch.Generator().manual_seed(0)
    wild = (
        w
        * 10.0 ** (12 * torch.rand(w.shape, generator=rng, dtype=torch.float64))
        * torch.randn(w.shape, generator=rng).sign()
    )
    return [[w], [w, 0.999 * w], [w, -w], [wild], [1e30 * w], [1e-30 * w], [wild, w]]


def drawn(batch) -> np.ndarray:
    mask = np.zeros(N, bool)
    mask[batch] = True
    return mask


def of_silo(
    made: Products, points, batch, data: Records | None = None, clip: float = CLIP, threads: int = 1
) -> np.ndarray:
    data = data or records()
    return made.sum(
        points,
        data.x[0],
        data.y[0],
        drawn(batch),
        clip,
        lattice_step(clip, made._problem.dim),
        threads=threads,
    )


@pytest.fixture(params=MODELS)
def made(request, monkeypatch) -> Products:
    """Sixteen records in a chunk, thirteen in the last."""
    monkeypatch.setattr(products, "MOST", 16)
    return Products(problem_of(request.param), (64,))


def test_layers_are_summed_in_both_ways(made):
    if isinstance(made._problem.model[0], nn.Unflatten) and len(made._layers) > 2:
        assert {layer.made for layer in made._layers.values()} == {True, False}
    assert made.chunk == 16


def test_the_sum_is_that_of_the_clipped_gradients(made):
    """To 2^-14 of the clip for each record: what float32 and the grids lose."""
    data, of = records(), made._problem
    for points in points_of(of)[:3]:
        rows = Gradients(of, points)(data.x[0].double(), data.y[0])
        scale = (CLIP / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
        wanted = (rows * scale).sum(0).numpy()
        got = of_silo(made, points, np.arange(N)) * lattice_step(CLIP, of.dim)
        assert np.linalg.norm(got - wanted) <= N * CLIP * 2.0**-14


def test_a_records_integers_are_the_same_whatever_the_others_hold(made):
    gamma = lattice_step(CLIP, made._problem.dim)
    for points in points_of(made._problem):
        rows, kept = made.rows(points, CLIP, gamma), []
        for others in (None, math.nan, math.inf, 3e38, 1e-40, 0.0):
            data = records(others)
            whole = torch.cat(
                [rows(data.x[0, at : at + 16], data.y[0, at : at + 16]) for at in (0, 16, 32)]
            )
            kept.append(whole[MINE])
        assert all(torch.equal(values.nan_to_num(), kept[0].nan_to_num()) for values in kept)


def test_no_record_moves_a_sum_by_more_than_its_bound_in_any_batch(made):
    """Joining a batch, a record moves S by at most C / gamma, and replaced by another one by at
    most 2 C / gamma; exactly, in integers.
    """
    gamma = lattice_step(CLIP, made._problem.dim)
    most = int((CLIP / gamma) ** 2)
    for points in points_of(made._problem):
        for others in (None, 3e38, 0.5):
            for batch in ([], [1, 2, 8, 30], list(range(N))):
                rest = [i for i in batch if i != 7]
                with_it, without = (
                    of_silo(made, points, b, records(others)) for b in ([*rest, 7], rest)
                )
                assert sum(int(k) ** 2 for k in with_it - without) <= most


@pytest.mark.parametrize("batch", [[], [0], [16, 31], MINE, range(N)])
def test_every_chunk_is_computed_whoever_was_drawn(made, monkeypatch, batch):
    """Else the time of an answer says in which chunks nobody is in a secret batch."""
    shipped, sizes = Products._records, []

    def counted(self, points, x, *words, **more):
        sizes.append(len(x))
        return shipped(self, points, x, *words, **more)

    monkeypatch.setattr(Products, "_records", counted)
    w = made._problem.initial([1]).double()
    of_silo(made, [w], list(batch))
    assert sorted(sizes) == [13, 16, 16]


def test_products_of_a_chunk_are_those_of_integers(made):
    """What a chunk adds is rho times the whole sum over records and places, in Python's own
    integers.
    """
    data, of = records(), made._problem
    points = [made._tracer.parameters(w) for w in points_of(of)[0]]
    chunk, kept = made._records(
        points, data.x[0, :16], data.y[0, :16], CLIP, lattice_step(CLIP, of.dim)
    )
    assert bool(kept.all())
    totals = chunk.added(kept)
    for layer, a, v, rho in zip(
        chunk.layers[len(chunk.wholes) :], chunk.a, chunk.v, chunk.rhos, strict=True
    ):
        left, right = (factor.flatten(0, 1).numpy().astype(object) for factor in (v, a))
        assert all(float(v).is_integer() for factor in (left, right) for v in factor.flatten())
        exact = np.vectorize(int)(left).astype(object).T @ np.vectorize(int)(right).astype(object)
        got = torch.cat([totals[name].reshape(len(exact), -1) for name in layer.names.values()], 1)
        wanted = np.round((exact * rho).astype(np.float64))
        np.testing.assert_array_equal(got.numpy(), wanted)


def test_a_record_above_its_bound_is_zero_and_nobody_else_is(made, monkeypatch):
    """Where clipping itself is wrong, the check of integers still keeps the bound: a mistake of
    floats costs accuracy, never privacy.
    """
    points, gamma = (
        [made._tracer.parameters(w) for w in points_of(made._problem)[0]],
        lattice_step(CLIP, made._problem.dim),
    )

    def integers() -> torch.Tensor:
        chunk, kept = made._records(points, records().x[0, :16], records().y[0, :16], CLIP, gamma)
        return chunk.numbers() * kept[:, None]

    before, squares = integers(), factors.Chunk.squares
    wrong = torch.where(torch.arange(16) == 3, 0.0, 1e4).double()
    monkeypatch.setattr(factors.Chunk, "squares", lambda self: [wrong for _ in squares(self)])
    rows = integers()
    assert bool(before[3].any())
    assert not bool(rows[3].any())
    assert all(bool(rows[i].any()) for i in range(16) if i != 3)


def test_models_that_are_not_known_to_the_last_module_go_record_by_record():
    class Own(nn.Linear):
        pass

    frozen = nn.Sequential(nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
    frozen[0].weight.requires_grad_(False)
    for model in (
        nn.Sequential(Own(64, 3)),
        nn.Sequential(
            nn.Linear(64, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Bilinear(1, 1, 1)
        ),
        frozen,
    ):
        assert Products.of(Problem(model, cross_entropy), (64,)) is None
    assert (
        Products.of(
            Problem(nn.Sequential(nn.Linear(64, 3)), lambda output, target: output.sum(-1)), (64,)
        )
        is None
    )


# of which the loss of a chunk is broadcast along its records, though each record by itself is sound
MIXING = {
    "an axis beside the records'": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        Huber(0.3),
        (1, 8),
    ),
    "no axis of outputs": (
        lambda: nn.Sequential(nn.Linear(8, 3), nn.Flatten(0, 1)),
        Huber(0.3),
        (8,),
    ),
    "as many outputs as records": (lambda: nn.Sequential(nn.Linear(8, 16)), logistic, (8,)),
    "a sum of other axes": (
        lambda: nn.Sequential(nn.Linear(8, 8), Residual(nn.Linear(8, 8), MeanPool()), nn.Flatten()),
        cross_entropy,
        (3, 8),
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_whose_loss_would_mix_records_goes_record_by_record(name):
    model, loss, shape = MIXING[name]
    assert Products.of(Problem(model(), loss), shape) is None


def test_targets_that_would_be_broadcast_along_records_go_record_by_record():
    assert Products.of(Problem(nn.Sequential(nn.Linear(8, 1)), logistic), (8,), (1,)) is None


def test_a_gate_sees_labels_that_mix_in_chunks_of_every_size(monkeypatch):
    """Where nothing else looks, the gate's own test does: a slope that takes the next record's
    target, in a last chunk of two as well.
    """
    monkeypatch.setattr(products, "MOST", 16)
    traced = Products._traced
    monkeypatch.setattr(Products, "_traced", lambda self, w, x, y: traced(self, w, x, y.roll(1)))
    for n in (2, 18, 45):
        data = Records.of(
            [(np.random.default_rng(0).normal(size=(n, 64)).astype(np.float32), np.arange(n) % 2)]
        )
        with pytest.raises(BadInput, match="depends on the"):
            Exact(
                problem_of("logistic"), data, partition=lambda name, batches: np.arange(0)
            ).verify()


def test_the_sum_is_the_same_to_the_last_bit_with_any_number_of_threads(made):
    for points in points_of(made._problem):
        alone = of_silo(made, points, range(0, N, 2))
        for threads in (2, 5):
            np.testing.assert_array_equal(
                of_silo(made, points, range(0, N, 2), threads=threads), alone
            )


def test_what_is_known_of_records_changes_no_bit(made, monkeypatch):
    """Of ordinary records and of hostile ones, in any batch; and it is known of chunks as they are
    asked, for layers that no point changes.
    """
    for others in (None, math.nan, math.inf, 3e38, 1e-40, 0.0):
        data = records(others)
        x, y = data.x[0], data.y[0]
        known, words = (
            made.known(x),
            (drawn(range(0, N, 2)), CLIP, lattice_step(CLIP, made._problem.dim)),
        )
        assert len(known) == (3 if isinstance(made._problem.model[0], nn.Linear) else 0)
        for points in points_of(made._problem):
            np.testing.assert_array_equal(
                made.sum(points, x, y, *words, 2, known), made.sum(points, x, y, *words)
            )
    monkeypatch.setattr(products, "KEPT", N * 65 - 1)
    assert made.known(x) == []


def test_a_gate_tries_what_it_keeps_of_its_records(monkeypatch):
    """Planted: what is kept of a record follows from the last of its chunk."""
    made = Products.known

    def gate():
        return Exact(problem_of("mlp"), records(), partition=lambda name, batches: np.arange(N))

    def mixed(self, x):
        return [
            {layer: (a + (a[-1:] > 0), *more) for layer, (a, *more) in chunk.items()}
            for chunk in made(self, x)
        ]

    assert gate()._known
    monkeypatch.setattr(Products, "known", mixed)
    with pytest.raises(BadInput, match="does not serve"):
        gate().verify()


def test_a_gate_does_not_serve_where_a_layer_raises_on_a_record_beside_others(monkeypatch):
    """It would raise after a charge: nobody asks a chunk of products again."""
    asked, traced = (
        Exact(problem_of("mlp"), records(), partition=lambda name, batches: np.arange(N)),
        Products._traced,
    )

    def raising(self, w, x, y):
        if bool(x.isnan().any()):
            raise ValueError("a kernel that does not like this record")
        return traced(self, w, x, y)

    monkeypatch.setattr(Products, "_traced", raising)
    with pytest.raises(BadInput, match="fail on an invented record"):
        asked.verify()


def test_a_layer_that_is_not_trained_has_no_part_in_the_sum():
    model = nn.Sequential(nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    of = Problem(model, cross_entropy)
    made = Products(of, (64,))
    assert of_silo(made, [of.initial([0])], range(N)).shape == (18,)


def test_a_gate_does_not_serve_where_a_product_of_integers_is_not_exact(monkeypatch):
    asked = Exact(problem_of("mlp"), records(), partition=lambda name, batches: np.arange(N))
    asked.verify()
    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda self, other: plain(self.float(), other.float()).double()
    )
    with pytest.raises(BadInput, match="not exact"):
        asked.verify()


def test_a_gate_does_not_serve_where_a_record_depends_on_the_others(monkeypatch):
    asked, traced = (
        Exact(problem_of("mlp"), records(), partition=lambda name, batches: np.arange(N)),
        Products._traced,
    )

    def mixed(self, w, x, y):
        more = 1 + 2.0**-23 * (x.nan_to_num().flip(0).sum(1, keepdim=True) > 0).float()
        return [(layer, a, e * more) for layer, a, e in traced(self, w, x, y)]

    monkeypatch.setattr(Products, "_traced", mixed)
    with pytest.raises(BadInput, match="depends on the"):
        asked.verify()
