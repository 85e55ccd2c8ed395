"""The choice of the iterate that a run returns: the last, a uniformly random one (the paper's
rule), or the average of the tail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.server.kept import Kept
from silodp.server.order import OUTPUTS as RULES


def output(iterates: Iterable[Tensor] | Kept, rule: str = "last", *, seed: int = 0) -> Tensor:
    """Run the generator to its end, and return the iterate that the rule chooses.

    All three rules are post-processing of releases, so none costs privacy. Raise BadInput if the
    rule is unknown, or if there is no iterate.
    """
    if rule not in RULES:
        raise BadInput(f"output rule {rule!r} is unknown; choose one of {', '.join(RULES)}")
    if isinstance(iterates, Kept):
        points = iterates
    elif rule == "last":
        points = list(deque(iterates, maxlen=1))
    else:
        points = list(iterates)
    if not len(points):
        raise BadInput("the algorithm made no step; give it at least one round")
    if rule == "random":
        return points[int(np.random.default_rng(seed).integers(len(points)))]
    if rule == "tail":
        first = len(points) // 2
    else:
        first = len(points) - 1
    total = points[first]
    for place in range(first + 1, len(points)):
        total = total + points[place]
    return total / (len(points) - first)
