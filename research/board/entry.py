"""An entry for the leaderboard, and its attack. Copy this file and change the class.

    python -m research board --entry research/board/entry.py:ENTRY --contestants "noisy mean"
    PYTHONPATH=$PWD silodp audit certify research/board/entry.py:release --epsilon 1

This entry learns no more than the share with the outcome.
"""

import numpy as np

from research.board.attack import released_by
from research.board.contestant import Answer, Case
from silodp.core.privacy.accounting import Budget, gdp_mu


class NoisyMean:
    """The share of the second class in each silo under noise, averaged over the silos."""

    name = "noisy mean"
    trust = "isrl"
    tasks = frozenset({"binary"})

    def predict(self, case: Case) -> Answer:
        """Predict the noisy share for every test row."""
        random = np.random.default_rng(case.seed)
        labels = [y for _, y in case.training().values()]
        # Replacing one row moves the sum of a silo by at most 1.
        noise = random.normal(0, 1 / gdp_mu(Budget(case.epsilon, case.delta)), len(labels))
        share = (sum(y.sum() for y in labels) + noise.sum()) / sum(map(len, labels))
        risk = np.clip(share, 0.01, 0.99)
        predictions = {silo: np.full(len(x), risk) for silo, x in case.inputs().items()}
        return Answer(predictions, case.epsilon)


ENTRY = NoisyMean()
release = released_by(ENTRY, epsilon=1.0)
