"""Check that a feature map is a public function of one record."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from silodp.core.features.feature_map import FeatureMap
from silodp.testing.sentence import one_sentence

SIZES = (0.1, 1.0, 10.0, 100.0)
"""The sizes of the numbers in the records of the check. One more record is zero."""


def check_feature_map(
    function: Callable[[Tensor], Tensor], features: int, *, norm: float = math.inf, seed: int = 0
) -> None:
    """Check a feature map of yours.

    Raise AssertionError with one sentence if something is wrong.

    `function` maps one record's raw `features` (k,) to others (m,). On random records and on zero
    it must give a vector of finite numbers, of the same length for every record. The vector must be
    the same in another order and when it is computed again. It must not be longer than `norm`, if
    you give one.
    """
    name = getattr(function, "__name__", type(function).__name__)
    assert callable(function), (
        f"{name} is not a function; it must map one record's features (k,) to others (m,)"
    )
    random = torch.Generator().manual_seed(seed)
    x = torch.cat(
        [
            torch.zeros(1, features),
            *(size * torch.randn(3, features, generator=random) for size in SIZES),
        ]
    )
    with one_sentence(name):
        mapped = FeatureMap(name, function).tried(x)
    longest = float(mapped.norm(dim=1).max())
    assert longest <= norm * (1 + 1e-6), (
        f"the features {name} have norm {longest:.6g} on a made-up record; it must be at most "
        f"{norm:g}"
    )
