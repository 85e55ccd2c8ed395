"""One question instead of many: private sums of all products of features and label (Wang 2018,
AdaSSP). The server computes the model from these sums.
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
from silodp.server.federation import StopRun

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
    """Fit a linear or logistic model from one question, without a step size or a number of rounds.

    The generator yields one iterate.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem, and the starting points (J, d).
    - `step`: not used. Every algorithm has this argument.
    - `gram`: the release of the sums. Its clip is in units of half the greatest length of a record
      with features in [-1, 1]. So at clip 2 no record is scaled down.
    - `cap` (default 1): for a numeric label without a schema, the public bound at which the label
      is cut.
    """
    statistic = question(problem, gram.clip, cap)
    value, noise, records = fed.measure(Query(statistic, gram.clipped(statistic.norm)))
    fitted = solution(problem, statistic, value.cpu(), noise.cpu(), records.cpu()).to(w)
    if len(fitted) == 1 and bool(fitted.isnan().any()):
        raise StopRun(
            "the noise decides the answer to the one question of one-shot, so no model is made of "
            "it; use a larger --epsilon, more records, or leave --algorithm out"
        )
    yield fitted.expand(max(len(fitted), len(w)), -1)
