"""The port that algorithms ask: a mean of releases over the silos that take part in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.query import Query
from silodp.core.weights import Weights


class Answered(Protocol):
    """What came back: `value` (J, M, d), a private vector for each run and silo that answered, and
    the numbers of these M silos.
    """

    @property
    def value(self) -> Tensor: ...
    @property
    def silos(self) -> tuple[int, ...]: ...


class Measured(NamedTuple):
    """A mean (J, d), the standard deviation (J, 1) of the noise in each of its coordinates, and how
    many records it is as good as (J, 1): all that were asked about where these count alike."""

    mean: Tensor
    noise: Tensor
    records: Tensor


class Channel(Protocol):
    """Carries one query to the named silos and brings back the releases of those that answer,
    stacked on the silo axis.
    """

    def ask(self, query: Query, silos: Sequence[int]) -> Answered: ...


@runtime_checkable
class Combining(Protocol):
    """A channel that combines answers itself, as they come: (J, d), and whose they are."""

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[Tensor, tuple[int, ...]]: ...


class StopRun(Exception):
    """The run cannot go on, for the reason that its sentence names; it ends with its last iterate.

    `codes` has the silos that did not answer, and why, where that is the reason.
    """

    def __init__(self, sentence: str, codes: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.codes = dict(codes or {})


class Absent(StopRun):
    """None of the silos that were asked has answered; an algorithm that asks silos one by one may
    go on without this one.
    """


class Port(Protocol):
    """What an algorithm may do."""

    def mean(self, query: Query) -> Tensor: ...
    def measure(self, query: Query) -> Measured: ...
    def each(self) -> Mapping[int, Port]: ...
    def cohort(self) -> Port: ...


# --- who takes part ------------------------------------------------------------------------------


class Everyone:
    """All N silos in every round."""

    def __init__(self, silos: int) -> None:
        self.silos = silos

    def draw(self) -> tuple[int, ...]:
        return tuple(range(self.silos))

    def rehearsal(self) -> Everyone:
        """Who is charged in a dry run, from the first round on."""
        return self

    def missed(self, answered: tuple[int, ...]) -> None:
        """Only these answered the last draw; whoever did not is drawn again like anybody else."""


class Uniform(Everyone):
    """M of N uniformly at random (ass. 3 of the paper); with a `least`, M_r is itself uniform on
    [least, M].

    Nobody can know beforehand how often a silo will be available, so a dry run charges everyone for
    every round.
    """

    def __init__(self, silos: int, answering: int, *, seed: int, least: int | None = None) -> None:
        least = answering if least is None else least
        if not 1 <= least <= answering <= silos:
            raise BadInput(
                f"{least if least < 1 else answering} of {silos} silos cannot take part; "
                f"choose between 1 and {silos}"
            )
        super().__init__(silos)
        self.answering = answering
        self.least = least
        self._random = np.random.default_rng(seed)

    def draw(self) -> tuple[int, ...]:
        size = int(self._random.integers(self.least, self.answering + 1))
        return tuple(sorted(self._random.choice(self.silos, size, replace=False).tolist()))

    def rehearsal(self) -> Everyone:
        return Everyone(self.silos)


class Balanced(Everyone):
    """M of N in random order, such that in R rounds no silo takes part more than ceil(R M / N)
    times.

    The order is drawn from public coins, so a dry run knows it and each silo's noise is calibrated
    to the rounds it really answers.
    """

    def __init__(self, silos: int, answering: int, *, seed: int) -> None:
        if not 1 <= answering <= silos:
            raise BadInput(
                f"{answering} of {silos} silos cannot take part; choose between 1 and {silos}"
            )
        super().__init__(silos)
        self.answering = answering
        self.seed = seed
        self._draws = self._order()

    def _order(self) -> Iterator[tuple[int, ...]]:
        """Deals silos from a shuffled pack; the next pack is shuffled so that nobody is dealt twice
        in one round.
        """
        random = np.random.default_rng(self.seed)
        pack: list[int] = []
        while True:
            if len(pack) < self.answering:
                fresh = random.permutation(self.silos).tolist()
                late = [s for s in fresh if s not in pack]
                pack += late + [s for s in fresh if s not in late]
            hand = pack[: self.answering]
            pack = pack[self.answering :]
            yield tuple(sorted(hand))

    def draw(self) -> tuple[int, ...]:
        return next(self._draws)

    def rehearsal(self) -> Balanced:
        return Balanced(self.silos, self.answering, seed=self.seed)


# --- the port ------------------------------------------------------------------------------------


class Federation:
    """Asks whoever takes part in this round and combines what they release, as the mechanism says
    and the weights want.
    """

    def __init__(
        self,
        channel: Channel,
        participation: Everyone,
        weights: Weights = Weights(),  # noqa: B008 -- frozen
    ) -> None:
        self._channel = channel
        self._participation = participation
        self._weights = weights
        # once: to look at a protocol takes 0.1 ms
        if isinstance(channel, Combining):
            self._combining = channel
        else:
            self._combining = None
        self.check: Callable[[Query, Sequence[int]], None] | None = None
        """Looks at each question before it is asked, and raises where it may not be."""

    def mean(self, query: Query) -> Tensor:
        """(J, d): the mean over the answering silos; with equal weights each counts 1 / M_r as in
        the paper.
        """
        return self._ask(query)[0]

    def measure(self, query: Query) -> Measured:
        """The same, and what is known of its error: public, as prices and weights are."""
        mean, silos = self._ask(query)
        return Measured(mean, *query.mechanism.deviation(silos, self._weights))

    def _ask(self, query: Query) -> tuple[Tensor, tuple[int, ...]]:
        asked = self._participation.draw()
        if self.check:
            self.check(query, asked)
        if self._combining is not None:
            mean, silos = self._combining.combined(query, asked, self._weights)
        else:
            answers = self._channel.ask(query, asked)
            mean = query.mechanism.combine(answers.value, answers.silos, self._weights)
            silos = answers.silos
        if len(silos) < len(asked):
            self._participation.missed(silos)
        return mean, silos

    def each(self) -> dict[int, Federation]:
        """The silos of one round by number, each a federation of its own: for questions that differ
        from silo to silo.
        """
        return {i: self._of(Fixed((i,))) for i in self._participation.draw()}

    def cohort(self) -> Federation:
        """The silos of one round, held fixed: an SVRG epoch must ask those who gave its anchor."""
        return self._of(Cohort(self._participation.draw()))

    def _of(self, participation: Everyone) -> Federation:
        made = type(self)(self._channel, participation, self._weights)
        made.check = self.check
        return made


class Fixed(Everyone):
    """The same silos again and again."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members

    def draw(self) -> tuple[int, ...]:
        return self.members


class Cohort(Fixed):
    """An epoch's silos: those of the members that answer the first question, which gives the
    anchor.

    One of them that misses a later question is left out of that mean alone. If who drops out does
    not depend on the data, the mean of the others' differences is still an unbiased estimate of the
    cohort's, and its error is at most that of the differences, which shrink with the move of w; a
    silo that gave no anchor would bring the whole difference between silos instead.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        super().__init__(members)
        self._draws = 0

    def draw(self) -> tuple[int, ...]:
        self._draws += 1
        return self.members

    def missed(self, answered: tuple[int, ...]) -> None:
        if self._draws == 1:
            self.members = answered
