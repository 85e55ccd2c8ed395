"""Adam on the releases of MB-SGD. The server computes both moments from releases, so the moments
cost no privacy.
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
    """Run MB-SGD with Adam on the server.

    The method is that of Kingma & Ba (2015), with momentum = beta_1, decay = beta_2 and floor =
    their epsilon. The second moment v includes the noise.

    The prox keeps the Euclidean metric, as the weight decay of AdamW does. This is exact for f1 = 0
    and for boxes. Another penalty is weighed against the gradient divided by sqrt(v), not against
    the gradient.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem with its prox, and the starting
      points (J, d).
    - `rounds` (default 25): number of rounds.
    - `step` (default 0.5): step size.
    - `momentum` (default 0.9): decay of the first moment, beta_1.
    - `minibatch`: the release of each round, a mean gradient.
    - `decay` (default 0.999): decay of the second moment, beta_2.
    - `floor` (default 1e-8): number added to sqrt(v), so that no step divides by zero.
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
