"""Risks of the study of synthetic tables are judged as another library judges them."""

import numpy as np
import pytest
from scipy import special
from sklearn.metrics import log_loss, roc_auc_score

from research.risks import quality, world


def test_risks_are_judged_by_log_loss_and_auc():
    random = np.random.default_rng(1)
    logit = random.normal(-1, 1, 20_000)
    y = (random.random(len(logit)) < special.expit(0.3 + 0.5 * logit)).astype(int)
    found = quality(world(0.3).schema, logit[:, None], y)
    assert found.loss == pytest.approx(log_loss(y, special.expit(logit)))
    assert found.auc == pytest.approx(roc_auc_score(y, logit))
