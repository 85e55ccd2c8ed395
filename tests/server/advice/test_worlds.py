import pytest
import torch

from silodp.core.problem.task import Task
from silodp.server.advice.worlds import WORLDS, draw


@pytest.mark.parametrize("weights", [(0.15, 1.0), (1.0, 0.5), (0.2, 1.0, 0.5)])
def test_a_class_that_weighs_more_is_as_much_rarer(weights):
    task = Task("binary" if len(weights) == 2 else "multiclass", len(weights), weights)
    y = draw(WORLDS[0], ("number",) * 4, task, 4000, 10, 1).y
    shares = torch.bincount(y, minlength=len(weights)) / len(y)
    wanted = torch.tensor([1 / w for w in weights]) / sum(1 / w for w in weights)
    assert torch.allclose(shares, wanted, atol=0.01 if len(weights) == 2 else 0.15)
