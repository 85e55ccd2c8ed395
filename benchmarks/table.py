"""How a row of the table is made: results that must agree before anything is timed, then times
taken in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Method:
    run: Callable[[], object]
    """What is timed, by the clock outside; or a float, the seconds that it measured itself."""
    check: Callable[[], tuple[Tensor, Tensor]]
    """Its result without noise, and what that must be."""
    runs: int = 1
    """How many runs one call makes; its time is divided by them."""


@dataclass(frozen=True)
class Row:
    part: str
    work: str
    method: str
    median_ms: float
    ratio: float | None = None
    """Its median by that of the first method."""
    peak_mib: float | None = None

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        memory = "" if self.peak_mib is None else f"{self.peak_mib:.0f}"
        return f"{self.part:10}{self.work:48}{self.method:42}{self.median_ms:12.2f}{ratio:>9}{memory:>10}"  # noqa: E501


HEAD = f"{'part':10}{'work':48}{'method':42}{'median ms':>12}{'ratio':>9}{'peak MiB':>10}"


def build(methods: dict[str, Callable[[], Method]]) -> dict[str, Method]:
    """The methods whose package is installed; the others are named."""
    found = {}
    for name, make in methods.items():
        try:
            found[name] = make()
        except ModuleNotFoundError as error:
            print(
                f"{name} is left out: {error.name} is not installed, see "
                "benchmarks/requirements.txt"
            )
    return found


def compare(part: str, work: str, methods: dict[str, Method], repeat: int) -> list[Row]:
    """One row for each method; refuses to time one whose result is another."""
    for name, method in methods.items():
        result, expected = method.check()
        if not (error := float((result - expected).norm() / expected.norm())) <= TOLERANCE:
            raise SystemExit(
                f"{work}: {name} differs from silodp by {error:.1e} of the norm, so "
                "nothing was timed"
            )
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeat):  # in turns, so that a busy moment of the machine hits all of them
        for name, method in methods.items():
            times[name] += [1e3 * seconds / method.runs for seconds in _turn(method.run)]
    median = {name: statistics.median(taken) for name, taken in times.items()}
    first = next(iter(median.values()))
    rows = [Row(part, work, name, taken, taken / first) for name, taken in median.items()]
    print(*rows, sep="\n", flush=True)
    return rows


def _turn(run: Callable[[], object]) -> list[float]:
    """Calls for half a second, at least one: what a call takes among its like, not just after
    another method's.
    """
    taken = [_seconds(run)]
    while sum(taken) < 0.5:
        taken.append(_seconds(run))
    return taken


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    own = run()
    return own if isinstance(own, float) else time.perf_counter() - start
