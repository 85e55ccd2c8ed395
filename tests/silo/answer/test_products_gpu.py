"""The same sums on a GPU: a record's integers are its own there too, products are those of
integers, and where floats are exact both agree in every bit.
"""

import math
import os

import numpy as np
import pytest
import torch
from test_products import CLIP, MINE, MODELS, N, drawn, of_silo, points_of, problem_of, records
from torch import nn

from silodp.core.lattice import lattice_step
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.silo.answer.products import Products

DEVICE = os.environ.get("SILODP_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
)


def made_there(name: str) -> Products:
    return Products(problem_of(name), (64,), device=DEVICE)


def test_on_a_gpu_a_records_integers_are_the_same_whatever_the_others_hold():
    for name in MODELS:
        made = made_there(name)
        for points in points_of(made._problem):
            rows, kept = made.rows(points, CLIP, lattice_step(CLIP, made._problem.dim)), []
            for others in (None, math.nan, math.inf, 3e38, 1e-40, 0.0):
                data = records(others)
                kept.append(rows(data.x[0], data.y[0])[MINE])
            assert all(torch.equal(values.nan_to_num(), kept[0].nan_to_num()) for values in kept)


def test_on_a_gpu_products_of_a_chunk_are_those_of_integers():
    for name in MODELS:
        made, data = made_there(name), records()
        for points in points_of(made._problem)[:3]:
            words = (
                [made._tracer.parameters(w) for w in points],
                made._own(data.x[0]),
                made._own(data.y[0]),
            )
            chunk, kept = made._records(*words, CLIP, lattice_step(CLIP, made._problem.dim))
            integers = [
                [t.flatten(0, 1).cpu().numpy().astype(np.int64) for t in both]
                for both in zip(chunk.v, chunk.a, strict=True)
            ]
            totals, drawn_in = chunk.added(kept), kept.cpu().numpy()
            for layer, (left, right), rho in zip(
                chunk.layers[len(chunk.wholes) :], integers, chunk.rhos, strict=True
            ):
                left = left * np.repeat(drawn_in, len(left) // len(drawn_in))[:, None]
                wanted = np.round((left.T @ right) * rho)
                got = torch.cat(
                    [totals[name].reshape(len(wanted), -1) for name in layer.names.values()], 1
                )
                np.testing.assert_array_equal(got.cpu().numpy(), wanted)


def test_on_a_gpu_no_record_moves_a_sum_by_more_than_its_bound():
    for name in MODELS:
        made = made_there(name)
        most = int((CLIP / lattice_step(CLIP, made._problem.dim)) ** 2)
        for points in points_of(made._problem):
            for others in (None, 3e38, 0.5):
                with_it, without = (
                    of_silo(made, points, batch, records(others))
                    for batch in ([1, 2, 7, 30], [1, 2, 30])
                )
                assert sum(int(k) ** 2 for k in with_it - without) <= most


def test_where_floats_are_exact_both_devices_give_the_same_bits_and_else_nearly_the_same():
    rng = np.random.default_rng(0)
    x, y = (
        torch.from_numpy(rng.integers(-8, 9, (N, 64))).float(),
        torch.from_numpy(rng.integers(-4, 5, N)).float(),
    )
    problem = Problem(nn.Sequential(nn.Linear(64, 1)), squared_error)
    w, clip = torch.from_numpy(rng.integers(-16, 17, (1, 65)) / 16.0), 2.0**20
    here, there = (
        Products(problem, (64,), device=device).sum(
            [w], x, y, drawn(range(N)), clip, lattice_step(clip, 65)
        )
        for device in ("cpu", DEVICE)
    )
    assert here.any()
    np.testing.assert_array_equal(here, there)
    for name in MODELS:
        for points in points_of(problem_of(name))[:3]:
            sums = [
                of_silo(Products(problem_of(name), (64,), device=device), points, range(N)).astype(
                    float
                )
                for device in ("cpu", DEVICE)
            ]
            assert np.linalg.norm(sums[0] - sums[1]) <= N * 2.0**-14 * CLIP / lattice_step(
                CLIP, problem_of(name).dim
            )
