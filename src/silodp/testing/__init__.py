"""Check what you add to silodp.

Give a check your object. It raises AssertionError with one sentence if something is wrong.

There is one check for each kind of thing: `check_algorithm`, `check_prox`, `check_model` (a model
with its loss), `check_feature_map`, `check_statistic`, `check_mechanism`, `check_sampling` and
`check_federation`. No check needs a registered object. Everything that silodp ships passes its
check. The names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from silodp.testing.algorithm import check_algorithm
    from silodp.testing.feature_map import check_feature_map
    from silodp.testing.federation import check_federation
    from silodp.testing.mechanism import check_mechanism
    from silodp.testing.model import check_model
    from silodp.testing.prox import check_prox
    from silodp.testing.sampling import check_sampling
    from silodp.testing.statistic import check_statistic

__all__ = [
    "check_algorithm",
    "check_feature_map",
    "check_federation",
    "check_mechanism",
    "check_model",
    "check_prox",
    "check_sampling",
    "check_statistic",
]


def __getattr__(name: str):
    """Return a check, loaded on first use. Raise AttributeError for another name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{name.removeprefix('check_')}"), name)


def __dir__() -> list[str]:
    """Return the names of the checks."""
    return __all__
