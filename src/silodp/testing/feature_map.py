"""Says whether a map of features is a public function of one record."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from silodp.core.features.feature_map import FeatureMap
from silodp.testing.sentence import one_sentence

SIZES = (0.1, 1.0, 10.0, 100.0)
"""Of the numbers in the records that it is shown; one more record is zero."""


def check_feature_map(
    function: Callable[[Tensor], Tensor], features: int, *, norm: float = math.inf, seed: int = 0
) -> None:
    """Says whether a map of features of yours is one: raises AssertionError with one sentence if
    not.

    `function` takes one record's raw `features` (k,) to others (m,). Checked on random records and
    on zero: that it gives a vector of finite numbers, as long for every record, the same in another
    order and when made again, and no longer than `norm` if you say one.
    """
    name = getattr(function, "__name__", type(function).__name__)
    assert callable(function), (
        f"{name} is no function; a map of features takes one record's features (k,) to others (m,)"
    )
    random = torch.Generator().manual_seed(seed)
    x = torch.cat(
        [
            torch.zeros(1, features),
            *(size * torch.randn(3, features, generator=random) for size in SIZES),
        ]
    )
    with one_sentence(name):
        found = FeatureMap(name, function).tried(x)
    longest = float(found.norm(dim=1).max())
    assert longest <= norm * (1 + 1e-6), (
        f"the features {name} have norm {longest:.6g} on a made-up record, more than the "
        f"{norm:g} that was said"
    )
