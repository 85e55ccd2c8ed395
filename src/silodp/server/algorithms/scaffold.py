"""ISRL-DP SCAFFOLD (DP-SCAFFOLD, Noble et al. 2022): local steps corrected by control variates that
the server keeps, all of them public.
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
    """DP-SCAFFOLD: local steps with public control variates.

    Silo i steps along g_i - c_i + c, where c_i is its mean gradient of the last round that it
    answered and c the mean of all c_i.

    Both follow from releases, so a silo keeps no state and pays for its local steps alone; a silo
    asked for the first time has c_i = c.
    """
    c = torch.zeros_like(w)
    known = dict[int, Tensor]()
    for r in range(rounds):
        moves = []
        for i, silo in fed.each().items():
            drift = c - known.get(i, c)
            with suppress(Absent):  # the round goes on without this one
                moves.append(
                    silo.mean(Query(SteeredSteps(w, local_steps, step, drift), minibatch.at(r)))
                )
                known[i] = -moves[-1] / (local_steps * step) - drift
        if not moves:
            raise Absent("no silo has answered this round")
        w = w + torch.stack(moves).mean(0)
        c = torch.stack(list(known.values())).mean(0)
        yield w
