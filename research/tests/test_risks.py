"""The table of risks: its measures are those of other libraries, and one row of it is computed."""

import numpy as np
import pandas as pd
import pytest
from scipy import special
from sklearn.metrics import log_loss, roc_auc_score

from research.risks import Study, measure, periods, quality, survival, table, world
from silodp.core.errors import BadInput


def test_risks_are_judged_by_log_loss_auc_and_the_slope_of_their_logits():
    random = np.random.default_rng(1)
    logit = random.normal(-1, 1, 20_000)
    y = (random.random(len(logit)) < special.expit(0.3 + 0.5 * logit)).astype(int)
    found = quality(world(0.3).schema, logit[:, None], y)
    assert found.loss == pytest.approx(log_loss(y, special.expit(logit)))
    assert found.auc == pytest.approx(roc_auc_score(y, logit))
    assert found.slope == pytest.approx(0.5, abs=0.05)
    assert found.mean == pytest.approx(special.expit(logit).mean())


def test_a_survival_time_is_judged_in_the_periods_in_which_it_is_at_risk():
    at_risk, event = periods(np.array([3, 2, 6]), 3)
    assert at_risk.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert event.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert survival().schema.label.task == "survival"


def test_a_row_has_the_model_and_the_pooled_one():
    whole = world(0.3)
    small = {name: frame.head(60) for name, frame in whole.frames.items()}
    settings = {"algorithm": "mb-sgd", "model": "logistic", "rounds": 3}
    rows = measure(Study(small, whole.schema), 8.0, [0, 1], **settings)
    assert isinstance(rows, pd.DataFrame)
    assert rows.seed.tolist() == [0, 1]
    assert (rows.pooled_loss < 0.8).all()
    assert rows.loss.notna().all()


def test_an_unknown_table_is_refused():
    with pytest.raises(BadInput, match="is unknown; choose from"):
        table(["nothing"], [1.0], 1, lambda line: None)
