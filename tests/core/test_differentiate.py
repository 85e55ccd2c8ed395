"""The gradient of one record is torch.func's own, to the last bit, and what torch.func refuses is
refused.
"""

import pytest
import torch
from torch import func

from silodp.core.differentiate import grad


def loss(w, x, y):
    return torch.nn.functional.softplus(-y * (x @ torch.tanh(w))) + (w**3).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_records_and_of_gradients_are_those_of_torch(dtype):
    w, x, y = (
        torch.randn(5, dtype=dtype),
        torch.randn(37, 5, dtype=dtype),
        torch.randn(37, dtype=dtype).sign(),
    )
    with torch.no_grad():
        assert torch.equal(
            func.vmap(grad(loss), (None, 0, 0))(w, x, y),
            func.vmap(func.grad(loss), (None, 0, 0))(w, x, y),
        )

    def steepness(of):
        return lambda w, x, y: (of(loss)(w, x, y) ** 2).sum()

    found, wanted = (
        func.vmap(of(steepness(of)), (None, 0, 0))(w, x, y) for of in (grad, func.grad)
    )
    assert torch.equal(found, wanted)
    assert not found.requires_grad


def test_a_loss_without_the_model_has_no_gradient_and_one_of_many_numbers_is_refused():
    w, x = torch.ones(3), torch.ones(3)
    assert torch.equal(grad(lambda w, x: x.sum())(w, x), torch.zeros(3))
    assert not w.requires_grad
    with pytest.raises(RuntimeError, match="one number"):
        grad(lambda w, x: (w * x)[:1])(w, x)
    assert torch.equal(
        grad(lambda w, x: (w * x).sum())(w, x), x
    )  # and what went wrong before has left nothing behind
