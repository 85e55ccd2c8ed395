"""A sparse clinical risk score: logistic regression with an L1 penalty over two hospitals, each
record protected in all that leaves them.

Run it: `python examples/risk_score.py`. It takes a few seconds, needs no download, and simulates
both hospitals in this process.
"""

from sklearn.datasets import load_breast_cancer
from torch import nn

from silodp import ALGORITHMS, Budget, Gaussian, Problem, calibrate, simulate
from silodp.core.figures import rounded_up
from silodp.core.problem.losses import logistic
from silodp.core.problem.prox import L1, Part
from silodp.server.settings import prepared
from silodp.silo.data.datasets import DATASETS
from silodp.testing.evaluate import error_rate

split = DATASETS["wbcd"].load(0, None)
records, names = split.train, load_breast_cancer().feature_names

# f0: the logistic loss of one patient. f1: an L1 penalty on the 30 weights, not on the bias, which
# comes last.
problem = Problem(nn.Sequential(nn.Linear(30, 1)), logistic, Part(L1(0.1), 0, 30))

# The noise is set before any record is touched: a dry run of the very algorithm fills each
# hospital's budget.
algorithm = prepared(ALGORITHMS["mb-sgd"], {"rounds": 30}, step=0.5)
budgets = [Budget(epsilon=2.0, delta=1 / n**2) for n in records.counts]
plan = calibrate(
    algorithm,
    {"minibatch": Gaussian("minibatch", clip=1.0, noise_multiplier=0.0)},
    budgets,
    records.counts,
)

federation, ledger = simulate(problem, records, plan, seeds=[0])
*_, w = algorithm(federation, problem, problem.initial([0]), **plan.mechanisms)

weights = dict(zip(names, w[0, :30].tolist(), strict=True))
print("The score adds up, for a patient whose features are standardised:")
for name, weight in sorted(weights.items(), key=lambda pair: -abs(pair[1])):
    if weight:
        print(f"  {weight:+.3f} x {name}")
print(f"{sum(v != 0 for v in weights.values())} of 30 features are used.")
print(
    f"Test error {error_rate(problem, w, split.test_x, split.test_y).item():.3f} (looked "
    "at raw data: a research figure)."
)
for name, spent in zip(records.names, ledger.epsilon()[0], strict=True):
    print(f"{name} has spent epsilon {rounded_up(spent, 4, 'f')} of 2.")
