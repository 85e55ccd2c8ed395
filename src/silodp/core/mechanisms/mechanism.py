"""Define the interface of every mechanism, which other code uses for all kinds alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.numbers import Number
from silodp.core.sampling import Sampling
from silodp.core.weights import Weights

if TYPE_CHECKING:
    from silodp.core.statistics import Statistic


class Mechanism:
    """How an answer is made private: it clips, takes a batch and adds noise.

    A new mechanism is one file in this package, and a privacy review.

    It defines what an answer costs (`event`), what no policy could allow (`check`), its fields on
    the wire (`wire`), and how the server combines the silos' answers (`combine`). Its noise is
    drawn where the records are: the answerers `match` the mechanism (`Exact`, `Simulated`).
    """

    kind: str
    clip: Number
    sampling: Sampling
    wire: ClassVar[dict[str, str]]
    noise: ClassVar[tuple[str, ...]]
    """The fields that decide the noise."""
    total: ClassVar[bool] = False
    """Whether answers are added up behind a shuffler or masks.

    The server then sees totals over silos, and no silo's own answer.
    """
    masked: ClassVar[bool] = False
    """Whether masks hide the silos' answers, without a shuffler. A query then names its cohort."""

    if TYPE_CHECKING:  # each kind is a frozen dataclass, whose own file defines its fields
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    def event(self, releases: int = 1, dimension: int = 1) -> Event | TotalEvent:
        """Return what an answer of so many releases of so many coordinates costs."""
        raise NotImplementedError

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """Return (J, d): what the server computes from the answers `value` of these silos."""
        raise NotImplementedError

    def deviation(self, silos: Sequence[int], weights: Weights) -> tuple[Tensor, Tensor]:
        """Return the noise of what `combine` returns, and how many records it is the mean of.

        The noise is the standard deviation in each coordinate. Both have the shape (J, 1).
        """
        raise NotImplementedError

    def noisy(self, event: Any) -> Any:
        """Return the event with this mechanism's own noise.

        A dry run counts queries before the noise is known.
        """
        return event

    def of(self, silo: int) -> Self:
        """Return the mechanism in plain numbers, as a query to this silo has it in one run."""
        raise NotImplementedError

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        """Raise Refused for a clip, noise, statistic or sampling without meaning, whatever the
        policy is.
        """
        if type(self.clip) is float and self.clip >= 0:
            return  # the usual case in every round, without the cost of tensors
        clip = self.clips
        if clip.shape not in ((), (runs, 1)) or not bool((clip >= 0).all()):
            raise Refused("clip")

    @property
    def clips(self) -> Tensor:
        """Return the clip as a tensor in float64."""
        return torch.as_tensor(self.clip, dtype=torch.float64)

    def clipped(self, clip: Number) -> Self:
        """Return this mechanism with another clip.

        The noise follows the clip and the price stays.
        """
        return replace(self, clip=clip)  # type: ignore[type-var]

    def at(self, index: int) -> Self:
        """Return the mechanism of round `index`.

        It takes that batch of a partition. Other samplings draw a new batch in each round anyway.
        """
        sampling = self.sampling.at(index)
        if sampling is self.sampling:
            return self
        return replace(self, sampling=sampling)  # type: ignore[type-var]

    def contributed(self, counts: Iterable[int]) -> int:
        """Return how many records silos of these sizes contribute in a round."""
        return sum(int(self.sampling.batch(n)) for n in counts)
