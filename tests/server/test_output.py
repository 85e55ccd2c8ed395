"""Which iterate a run hands over."""

import numpy as np
import pytest
import torch

from silodp.core.errors import BadInput
from silodp.server.output import RULES, output


def points(count):
    return [torch.full((2, 3), float(t)) for t in range(count)]


def test_the_last_iterate_is_the_default():
    assert output(iter(points(5))).tolist() == [[4.0] * 3] * 2


def test_the_last_rule_keeps_one_iterate_at_a_time():
    alive = []

    def run():
        for t in range(5):
            alive.append(t)
            yield torch.full((1, 1), float(t))

    assert output(run()).item() == 4.0
    assert alive == [0, 1, 2, 3, 4]


def test_the_tail_is_the_mean_of_the_second_half():
    assert output(points(6), "tail").tolist() == [[4.0] * 3] * 2
    assert output(points(5), "tail").tolist() == [[3.0] * 3] * 2
    assert output(points(1), "tail").tolist() == [[0.0] * 3] * 2


def test_the_tail_leaves_the_iterates_as_they_were():
    kept = points(4)
    output(kept, "tail")
    assert [float(p[0, 0]) for p in kept] == [0.0, 1.0, 2.0, 3.0]


def test_a_random_iterate_is_each_with_the_same_probability():
    """Chi-square over 5 iterates and 2000 fixed seeds; false-alarm rate 1e-6 (the statistic's upper quantile for 4 degrees is 33.4)."""
    kept = points(5)
    hits = np.bincount([int(output(kept, "random", seed=s)[0, 0]) for s in range(2000)], minlength=5)
    assert ((hits - 400) ** 2 / 400).sum() < 33.4


def test_a_random_iterate_is_the_same_for_the_same_seed():
    assert torch.equal(output(points(50), "random", seed=3), output(points(50), "random", seed=3))


@pytest.mark.parametrize("rule", RULES)
def test_a_run_without_a_step_is_refused(rule):
    with pytest.raises(BadInput, match="the algorithm made no step; give it at least one round"):
        output([], rule)


def test_an_unknown_rule_is_refused_before_the_run_begins():
    def run():
        raise RuntimeError("the run began")
        yield

    with pytest.raises(BadInput, match="output rule 'best' is unknown; choose one of last, random, tail"):
        output(run(), "best")
