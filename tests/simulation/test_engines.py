"""The simulation computes clipped sums with the engines that it is given."""

import pytest

from silodp.engine.clipping import choose
from silodp.server.order import Order
from silodp.silo.data.datasets import DATASETS
from silodp.simulation.sweep import Arm, run_arm
from silodp.simulation.tune import problem_of


class Counting:
    """An engine that counts its sums, and leaves each to an engine of the wheel."""

    def __init__(self):
        self.sums = 0

    def supports(self, task):
        return True

    def sum(self, task):
        self.sums += 1
        return choose(task).sum(task)


@pytest.mark.parametrize("trust", ["isrl", "central"])
def test_a_sweep_computes_with_the_engines_that_it_is_given(trust):
    order = Order("mb-sgd", trust=trust, model="logistic", rounds=3, noise="exact")
    arm = Arm("mb-sgd", order, {"step": (0.1,), "clip": (1.0,)})
    split, counting = DATASETS["wbcd"].load(0, None), Counting()
    problem = problem_of(order, split.train.x.shape[2:], split.classes)
    given = list(run_arm(arm, problem, split, 0, (3.0,), engines=(counting,)))
    assert counting.sums == 3
    assert given == list(run_arm(arm, problem, split, 0, (3.0,)))
