"""Adam on the releases of MB-SGD: both moments are made of releases on the server, so they cost no
privacy.
"""

import torch

from silodp.server.algorithms.language import (
    Gaussian,
    Grad,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    Tensor,
)


def adam(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    step: Number,
    momentum: Number,
    minibatch: Gaussian,
    decay: float = 0.999,
    floor: float = 1e-8,
) -> Iterator[Tensor]:
    """MB-SGD with Adam on the server. Kingma & Ba (2015): momentum = beta_1, decay = beta_2, floor
    = their epsilon; v holds the noise too.

    The prox keeps the Euclidean metric, as AdamW's weight decay does: exact for f1 = 0 and for
    boxes, but another penalty is weighed against the gradient divided by sqrt(v), not against the
    gradient.
    """
    m = torch.zeros_like(w)
    v = torch.zeros_like(w)
    for r in range(rounds):
        g = fed.mean(Query(Grad(w), minibatch.at(r)))
        m = momentum * m + (1 - momentum) * g
        v = decay * v + (1 - decay) * g.square()
        first = m / (1 - momentum ** (r + 1))
        second = v / (1 - decay ** (r + 1))
        w = problem.prox(w - step * first / (second.sqrt() + floor), step)
        yield w
