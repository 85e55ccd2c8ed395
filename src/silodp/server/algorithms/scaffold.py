"""ISRL-DP SCAFFOLD (DP-SCAFFOLD, Noble et al. 2022): local steps corrected by public control
variates on the server.
"""

from contextlib import suppress

import torch

from silodp.server.algorithms.language import (
    Absent,
    Gaussian,
    Iterator,
    Number,
    Port,
    Problem,
    Query,
    SteeredSteps,
    Tensor,
)


def scaffold(
    fed: Port,
    problem: Problem,
    w: Tensor,
    *,
    rounds: int,
    local_steps: int,
    step: Number,
    minibatch: Gaussian,
) -> Iterator[Tensor]:
    """Run DP-SCAFFOLD: local steps with public control variates.

    Silo i steps along g_i - c_i + c. Here c_i is the silo's mean gradient of the last round that it
    answered, and c is the mean of all c_i. Both follow from releases. So a silo stores no state,
    and pays for its local steps alone. A silo that has not answered before has c_i = c.

    Arguments:

    - `fed`, `problem`, `w`: the federation to ask, the problem, and the starting points (J, d).
      Silos apply the prox themselves.
    - `rounds` (default 25): number of rounds.
    - `local_steps` (default 5): noisy steps of each silo in a round.
    - `step` (default 0.5): step size of a local step.
    - `minibatch`: the release of each local step, a mean gradient.

    Raise Absent if no silo answers a round.
    """
    c = torch.zeros_like(w)
    variates = dict[int, Tensor]()
    for r in range(rounds):
        moves = []
        for i, silo in fed.each().items():
            drift = c - variates.get(i, c)
            with suppress(Absent):  # the round goes on without this one
                moves.append(
                    silo.mean(Query(SteeredSteps(w, local_steps, step, drift), minibatch.at(r)))
                )
                variates[i] = -moves[-1] / (local_steps * step) - drift
        if not moves:
            raise Absent("no silo has answered this round")
        w = w + torch.stack(moves).mean(0)
        c = torch.stack(list(variates.values())).mean(0)
        yield w
