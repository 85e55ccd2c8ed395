"""One question instead of many: private sums of all products of features and label, and everything
else on the server (Wang 2018, AdaSSP).
"""

from silodp.server.algorithms.language import (
    Annotated,
    Gaussian,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    Setting,
    Tensor,
)
from silodp.server.estimates.linear import question, solution

Cap = Annotated[
    float,
    Setting(
        above=0,
        finite=True,
        help=(
            "Of a number that is predicted without a schema: the public size beyond which it "
            "is cut."
        ),
    ),
]


def one_shot(
    fed: Port, problem: Problem, w: Tensor, *, step: Number, gram: Gaussian, cap: Cap = 1.0
) -> Iterator[Tensor]:
    """A linear or logistic model from one question, with nothing to tune.

    `clip` is in units of half the length that a record of features in [-1, 1] can have: at 2 none
    is scaled down. There is no step to take.
    """
    asked = question(problem, gram.clip, cap)
    value, noise, _ = fed.measure(Query(asked, gram.clipped(asked.norm)))
    found = solution(problem, asked, value.cpu(), noise.cpu()).to(w)
    yield found.expand(max(len(found), len(w)), -1)
