"""ISRL-DP Fed-SPIDER, the paper's alternate implementation: a fresh gradient and one difference in every round."""

from collections.abc import Iterator

from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import Number
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.algorithms.difference import Form, ask_difference
from silodp.server.federation import Port


def spider_alternate(
    fed: Port, problem: Problem, w: Tensor, *, rounds: int, step: Number, anchor: Gaussian, refine: Gaussian, slope: Number,
    form: Form = "move",
) -> Iterator[Tensor]:  # fmt: skip
    """Fed-SPIDER in two half-rounds a round: a step along a fresh gradient v, then a step along v plus the difference that the first step made."""
    for _ in range(rounds):
        v = fed.mean(Query(Grad(w), anchor))
        half = problem.prox(w - step * v, step)
        yield half
        v = v + fed.mean(ask_difference(half, w, refine, anchor, slope, form))
        w = problem.prox(half - step * v, step)
        yield w
