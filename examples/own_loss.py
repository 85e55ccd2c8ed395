"""A loss of your own: the median and an upper quantile of disease progression, by the pinball loss,
over four clinics.

Run it: `python examples/own_loss.py`; it takes a few seconds and needs no download. A loss takes
outputs (n, k) and targets (n,) to one number a record; silodp shows a loss that it does not know
one record at a time, so that no record can be mixed with another, and clips each record's gradient
whatever the loss is.
"""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from silodp import ALGORITHMS, Budget, Gaussian, Problem, Records, calibrate, simulate
from silodp.core.figures import rounded_up
from silodp.server.settings import prepared

LEVELS = (0.5, 0.9)


def pinball(output: Tensor, target: Tensor) -> Tensor:
    """Least, on average, where output k is the quantile LEVELS[k] of the target. Defined at top
    level: a gate approves a loss by its name.
    """
    over = target[:, None] - output
    levels = torch.tensor(LEVELS)
    return torch.maximum(levels * over, (levels - 1) * over).sum(-1)


def main() -> tuple[np.ndarray, np.ndarray]:
    """Trains and says what came of it; (held-out targets, their predicted quantiles)."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (
        (x / 0.05).astype("float32"),
        ((y - 150) / 100).astype("float32"),
    )  # public constants, not statistics of the records
    order = np.random.default_rng(0).permutation(len(y))
    test, train = order[:100], np.array_split(order[100:], 4)
    records = Records.of([(x[part], y[part]) for part in train], ["north", "east", "south", "west"])

    problem = Problem(nn.Sequential(nn.Linear(10, 2)), pinball)
    algorithm = prepared(ALGORITHMS["disk"], {"rounds": 60, "kappa": 0.5}, step=0.15)
    plan = calibrate(
        algorithm, {"minibatch": Gaussian("minibatch", 2.0, 0.0)}, Budget(3.0, 1e-4), records.counts
    )
    federation, ledger = simulate(problem, records, plan, seeds=[0])
    *_, w = algorithm(federation, problem, problem.initial([0]), **plan.mechanisms)

    predicted = problem.outputs(w, torch.from_numpy(x[test]))[0].detach().numpy()
    for level, share in zip(LEVELS, (y[test][:, None] <= predicted).mean(0), strict=True):
        print(
            f"{share:.0%} of 100 held-out patients are at or below the predicted "
            f"{level:.0%} quantile."
        )
    for name, spent in zip(records.names, ledger.epsilon()[0], strict=True):
        print(f"{name} has spent epsilon {rounded_up(spent, 4, 'f')} of 3.")
    return y[test], predicted


if __name__ == "__main__":
    main()
