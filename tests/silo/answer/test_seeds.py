"""Noise that can be guessed protects nobody: every bit of a seed counts."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records


def release(seed):
    records = Records.of([(np.ones((5, 2)), np.ones(5))])
    answerer = Simulated(Problem(nn.Linear(2, 1), squared_error), records, [seed])
    return answerer.answer(Query(Grad(torch.zeros(1, 3)), Gaussian("minibatch", 1.0, 3.0)), [0])


@pytest.mark.parametrize("bit", [0, 11, 12, 31, 32, 63, 64, 100, 127])
def test_seeds_that_differ_in_one_bit_give_other_noise(bit):
    """torch's CPU generator would keep the low 32 bits of a seed and forget the rest."""
    assert not torch.equal(release(5), release(5 ^ (1 << bit)))


def test_stages_of_one_training_run_have_noise_of_their_own():
    seen = [release((7, stage)) for stage in range(1, 4)] + [release(7)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
