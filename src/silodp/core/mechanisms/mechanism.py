"""What every mechanism says of itself, so that nobody else need know which it is."""

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
    """How an answer is made private: it clips, takes a batch and adds noise. A new one is one file
    in this package.

    It defines what an answer costs (`event`), what no policy could allow (`check`), its fields on
    the wire (`wire`), and how the server combines the silos' answers (`combine`). Its noise is
    drawn where records are: the answerers `match` the mechanism (`Exact`, `Simulated`).
    """

    kind: str
    clip: Number
    sampling: Sampling
    wire: ClassVar[dict[str, str]]
    noise: ClassVar[tuple[str, ...]]
    """Those of its fields that decide the noise."""
    total: ClassVar[bool] = False
    """Whether answers are for a shuffler, or masked, and added up: the server sees totals over
    silos, and no silo's own answer.
    """
    masked: ClassVar[bool] = False
    """Whether it is silos' masks that hide their answers, and no shuffler: a query then names its
    cohort.
    """

    if TYPE_CHECKING:  # each kind is a frozen dataclass, with fields that its own file knows
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __getattr__(self, name: str) -> Any: ...

    def event(self, releases: int = 1, dimension: int = 1) -> Event | TotalEvent:
        """What an answer costs that makes so many releases of so many coordinates."""
        raise NotImplementedError

    def combine(self, value: Tensor, silos: Sequence[int], weights: Weights) -> Tensor:
        """(J, d): what the server makes of the answers `value` of these silos."""
        raise NotImplementedError

    def deviation(self, silos: Sequence[int], weights: Weights) -> tuple[Tensor, Tensor]:
        """(J, 1): the standard deviation of the noise in each coordinate of what `combine` makes,
        and of how many records it is the mean.
        """
        raise NotImplementedError

    def noisy(self, event: Any) -> Any:
        """The event of this mechanism at its own noise: a dry run counts questions before the noise
        is known.
        """
        return event

    def of(self, silo: int) -> Self:
        """The mechanism as this silo is asked with it: plain numbers, in one run."""
        raise NotImplementedError

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        """Refuses a clip, a noise, a statistic or a sampling with which it makes no sense, whatever
        the policy.
        """
        if type(self.clip) is float and self.clip >= 0:
            return  # without torch, in every round
        clip = self.clips
        if clip.shape not in ((), (runs, 1)) or not bool((clip >= 0).all()):
            raise Refused("clip")

    @property
    def clips(self) -> Tensor:
        return torch.as_tensor(self.clip, dtype=torch.float64)

    def clipped(self, clip: Number) -> Self:
        """The same mechanism at another clip: the noise follows the clip, the price stays."""
        return replace(self, clip=clip)  # type: ignore[type-var]

    def at(self, index: int) -> Self:
        """The mechanism of round `index`: takes that batch of a partition; other samplings draw
        anew by themselves.
        """
        sampling = self.sampling.at(index)
        return self if sampling is self.sampling else replace(self, sampling=sampling)  # type: ignore[type-var]

    def contributed(self, counts: Iterable[int]) -> int:
        """How many records silos of these sizes contribute in a round."""
        return sum(int(self.sampling.batch(n)) for n in counts)
