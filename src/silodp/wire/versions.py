"""The versions of the engines that the tests have run against: the oldest and the newest of each.

`make test-engines` runs the tests of an engine against another version than the installed one.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from silodp.core.errors import BadInput

TESTED = {"nvflare": ("2.9.0", "2.9.0"), "flwr": ("1.41.0", "1.42.0")}
"""Oldest and newest version that was tested, by the engine's package."""
EXTRAS = {"nvflare": "nvflare", "flwr": "flower"}


def check(engine: str) -> None:
    """Raise BadInput unless the installed engine is in the tested range.

    Later corrections of the newest version (2.9.1 after 2.9.0) are in the range.
    """
    oldest, newest = TESTED[engine]
    wanted = f"install silodp[{EXTRAS[engine]}], which has {engine} {oldest} to {newest}"
    try:
        installed = version(engine)
    except PackageNotFoundError:
        raise BadInput(f"{engine} is not installed; {wanted}") from None
    if not supported(engine, installed):
        raise BadInput(f"{engine} {installed} is not supported; {wanted}")


def supported(engine: str, installed: str) -> bool:
    """Return whether a version of the engine is in the tested range."""
    oldest, newest = TESTED[engine]
    release = _release(installed)
    return _release(oldest) <= release and release[:2] <= _release(newest)[:2]


def _release(text: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
