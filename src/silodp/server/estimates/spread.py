"""Estimate how much of a model is privacy noise: the spread of its parameters over draws of the
noise.

The size of the noise in each answer is public, and so is the algorithm. So the server can run the
algorithm again on pure noise of the same sizes, many times at once, and look at how far the results
lie apart. No record is read, and no silo is asked.

The runs on pure noise have no signal and no penalty, so nothing pulls a result back once noise has
moved it. For gradient steps with momentum and averages the spread is therefore an upper bound: near
an optimum of a convex loss, a stable step only shortens an earlier move. `Adam` divides by the size
of its answers, which is smaller without a signal, so its bound is wide. A model from one question
(`one-shot`) is solved again with fresh noise on top of the answer, and the steps of `scaled` are
taken again with fresh noise on top of each answer. Its start and its features stay as they were in
the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.federation import Absent, Measured, StopRun
from silodp.server.output import output
from silodp.server.prepare import Prepared

DRAWS = 2000
"""Draws of the noise in one parameter: runs at once, times coordinates. All have the same law."""
COORDINATES = 256
"""Coordinates that are simulated, whatever the model's size."""
SOLUTIONS = 200
"""Models of which each parameter has a spread of its own."""


@dataclass(frozen=True)
class Answered:
    """The standard deviation of the noise in each coordinate of one answer, and the answer itself
    if the algorithm asked for its error. The deviation is NaN where it is unknown.
    """

    deviation: float
    measured: Measured | None = None


@dataclass(frozen=True)
class Roster:
    """The silos of one round that are asked one by one."""

    silos: tuple[int, ...]


class NoiseRecord:
    """What a federation has answered, in order, as far as its noise goes."""

    def __init__(self) -> None:
        self.entries: list[Answered | Roster | None] = []
        """None stands for a question that no silo answered."""

    def answered(self, query: Query, silos: Sequence[int], weights: Weights) -> None:
        """Add an answer of these silos."""
        try:
            noise, _ = query.mechanism.deviation(silos, weights)
            deviation = float(noise.max()) * query.statistic.gain
        except BadInput:
            deviation = math.nan
        self.entries.append(Answered(deviation))

    def measured(self, found: Measured) -> None:
        """Add to the last answer its value and error."""
        last = self.entries[-1]
        assert isinstance(last, Answered)
        self.entries[-1] = Answered(last.deviation, found)

    def absent(self) -> None:
        """Add a question that no silo answered."""
        self.entries.append(None)

    def roster(self, silos: Sequence[int]) -> None:
        """Add the silos of a round that are asked one by one."""
        self.entries.append(Roster(tuple(silos)))


class _OnNoise:
    """A port that answers with pure noise, of the sizes in the record."""

    def __init__(
        self,
        entries: Iterator[Answered | Roster | None],
        coins: torch.Generator,
        *,
        solved: bool,
    ) -> None:
        self._entries = entries
        self._coins = coins
        self._solved = solved

    def mean(self, query: Query) -> Tensor:
        shape = query.statistic.shape
        return self._normal(shape) * self._next().deviation

    def measure(self, query: Query) -> Measured:
        measured = self._next().measured
        if measured is None:
            raise StopRun("the record has another question here")
        if not self._solved:
            return measured
        noise = self._normal((SOLUTIONS, measured.mean.shape[-1])) * measured.noise.cpu()
        noise[0] = 0  # the first is the run itself
        return Measured(
            measured.mean.cpu() + noise,
            measured.noise.cpu().expand(SOLUTIONS, 1),
            measured.records.cpu().expand(SOLUTIONS, 1),
        )

    def each(self) -> dict[int, _OnNoise]:
        entry = next(self._entries, None)
        if not isinstance(entry, Roster):
            raise StopRun("the record has another question here")
        return dict.fromkeys(entry.silos, self)

    def cohort(self) -> _OnNoise:
        return self

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._coins, dtype=torch.float64)

    def _next(self) -> Answered:
        try:
            entry = next(self._entries)
        except StopIteration:
            raise StopRun("the record has ended") from None
        if entry is None:
            raise Absent("no silo answered this question")
        if not isinstance(entry, Answered):
            raise StopRun("the record has another question here")
        return entry


class _Free:
    """A problem without a penalty: its prox leaves every point where it is."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def prox(self, w: Tensor, step: Any) -> Tensor:
        return w

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


def noise_spread(
    made: Prepared, problem: Problem, record: NoiseRecord, *, seed: int
) -> float | list[float] | None:
    """Return the standard deviation of a parameter over draws of the noise, or a list of one for
    each parameter where an answer decides how far each of them moves.

    Return None if it cannot be computed: a silo's noise is unknown, or the algorithm stops or asks
    otherwise on pure noise.
    """
    measured = [isinstance(e, Answered) and e.measured is not None for e in record.entries]
    solved = bool(measured) and all(measured)
    if solved:
        start = problem.initial([seed]).double().cpu()
    elif any(measured):
        start = torch.zeros(SOLUTIONS, problem.dim, dtype=torch.float64)
    else:
        coordinates = min(problem.dim, COORDINATES)
        start = torch.zeros(math.ceil(DRAWS / coordinates), coordinates, dtype=torch.float64)
    port = _OnNoise(iter(record.entries), torch.Generator().manual_seed(0), solved=solved)
    iterates = []
    try:
        for w in made.run(port, _Free(problem), start, **made.mechanisms):  # type: ignore[arg-type]
            iterates.append(w)
    except (StopRun, BadInput):
        if not iterates:
            return None
    # The same iterate is returned as in the run itself.
    result = output(iterates, made.order.output, seed=seed).double()
    if any(measured):
        # The noise may decide an answer alone, and then there is no model.
        models = result[torch.isfinite(result).all(1)]
        if len(models) < 0.5 * SOLUTIONS:
            return None
        found = models.std(0)
    else:
        found = result.square().mean().sqrt()
    if not bool(torch.isfinite(found).all()):
        return None
    return found.tolist()
