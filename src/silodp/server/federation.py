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
    """The answers to a query: `value` (J, M, d), a private vector for each run and each silo that
    answered, and the numbers of these M silos.
    """

    @property
    def value(self) -> Tensor:
        """Return the private vectors (J, M, d)."""
        ...

    @property
    def silos(self) -> tuple[int, ...]:
        """Return the numbers of the M silos that answered."""
        ...


class Measured(NamedTuple):
    """A mean (J, d), the standard deviation (J, 1) of the noise in each of its coordinates, and its
    effective number of records (J, 1). This is the number of all records asked if these count
    alike.
    """

    mean: Tensor
    noise: Tensor
    records: Tensor


class Channel(Protocol):
    """Carries one query to the named silos. It brings back the releases of the silos that answer,
    stacked on the silo axis.
    """

    def ask(self, query: Query, silos: Sequence[int]) -> Answered:
        """Return the releases of the silos that answer."""
        ...


@runtime_checkable
class Combining(Protocol):
    """A channel that combines the answers itself, as they come."""

    def combined(
        self, query: Query, silos: Sequence[int], weights: Weights
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Return the weighted mean (J, d), and the silos that it includes."""
        ...


class Record(Protocol):
    """Notes what a federation has answered, for what is known of its noise."""

    def answered(self, query: Query, silos: Sequence[int], weights: Weights) -> None:
        """Note an answer of these silos."""

    def measured(self, found: Measured) -> None:
        """Note the value and the error of the last answer."""

    def absent(self) -> None:
        """Note a question that no silo answered."""

    def roster(self, silos: Sequence[int]) -> None:
        """Note the silos of a round that are asked one by one."""


class StopRun(Exception):
    """The run cannot continue, for the reason in the sentence. It ends with its last iterate.

    `codes` has the silos that did not answer, with a code for each reason, if that is why the run
    stops.
    """

    def __init__(self, sentence: str, codes: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.codes = dict(codes or {})


class Absent(StopRun):
    """None of the silos that were asked has answered. An algorithm that asks silos one by one may
    continue without this silo.
    """


class Port(Protocol):
    """The methods that an algorithm may call."""

    def mean(self, query: Query) -> Tensor:
        """Return the mean (J, d) of the releases of the silos that answer."""
        ...

    def measure(self, query: Query) -> Measured:
        """Return the mean with the size of its error."""
        ...

    def each(self) -> Mapping[int, Port]:
        """Return a port for each silo of one round, by the silo's number."""
        ...

    def cohort(self) -> Port:
        """Return a port that asks the same silos in every round."""
        ...


# --- who takes part ------------------------------------------------------------------------------


class Everyone:
    """Participation of all N silos in every round."""

    def __init__(self, silos: int) -> None:
        self.silos = silos

    def draw(self) -> tuple[int, ...]:
        """Return the silos of the next round."""
        return tuple(range(self.silos))

    def rehearsal(self) -> Everyone:
        """Return the participation that is charged in a dry run, from the first round on."""
        return self

    def missed(self, answered: tuple[int, ...]) -> None:
        """Note that only these silos of the last draw answered.

        By default this changes nothing: an absent silo is drawn again like any other.
        """


class Uniform(Everyone):
    """Participation of M of N silos, uniformly at random (ass. 3 of the paper). With a `least`, M_r
    is itself uniform on [least, M].

    How often a silo will be drawn is not known in advance. So a dry run charges every silo for
    every round.
    """

    def __init__(self, silos: int, answering: int, *, seed: int, least: int | None = None) -> None:
        if least is None:
            least = answering
        if not 1 <= least <= answering <= silos:
            if least < 1:
                impossible = least
            else:
                impossible = answering
            raise BadInput(
                f"{impossible} of {silos} silos cannot take part; choose between 1 and {silos}"
            )
        super().__init__(silos)
        self.answering = answering
        self.least = least
        self._random = np.random.default_rng(seed)

    def draw(self) -> tuple[int, ...]:
        """Return the silos of the next round, sorted."""
        size = int(self._random.integers(self.least, self.answering + 1))
        return tuple(sorted(self._random.choice(self.silos, size, replace=False).tolist()))

    def rehearsal(self) -> Everyone:
        """Return the participation of all silos."""
        return Everyone(self.silos)


class Balanced(Everyone):
    """Participation of M of N silos in random order. In R rounds no silo takes part more than
    ceil(R M / N) times.

    The order is drawn from public coins. So a dry run has the same order, and each silo's noise is
    calibrated to the rounds that it really answers.
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
        """Yield the silos of each round, dealt from a shuffled pack.

        A new pack is arranged so that no silo is dealt twice in one round.
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
        """Return the silos of the next round, sorted."""
        return next(self._draws)

    def rehearsal(self) -> Balanced:
        """Return a participation with the same order from the first round on."""
        return Balanced(self.silos, self.answering, seed=self.seed)


# --- the port ------------------------------------------------------------------------------------


class Federation:
    """Asks the silos that take part in a round. It combines their releases by the mechanism and the
    weights.
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
        # This is tested once, because a test against a protocol takes 0.1 ms.
        if isinstance(channel, Combining):
            self._combining = channel
        else:
            self._combining = None
        self.check: Callable[[Query, Sequence[int]], None] | None = None
        """Called before each question with its silos. It raises if the question is not allowed."""
        self.record: Record | None = None
        """Told of each answer, for what is known of its noise."""

    def mean(self, query: Query) -> Tensor:
        """Return the mean (J, d) over the answering silos. With equal weights each counts 1 / M_r,
        as in the paper.
        """
        return self._ask(query)[0]

    def measure(self, query: Query) -> Measured:
        """Return the mean with the standard deviation of its noise and its effective number of
        records.

        Both are public, because prices and weights are.
        """
        mean, silos = self._ask(query)
        found = Measured(mean, *query.mechanism.deviation(silos, self._weights))
        if self.record:
            self.record.measured(found)
        return found

    def _ask(self, query: Query) -> tuple[Tensor, tuple[int, ...]]:
        """Return the mean (J, d) and the silos that it includes."""
        drawn = self._participation.draw()
        if self.check:
            self.check(query, drawn)
        try:
            if self._combining is not None:
                mean, silos = self._combining.combined(query, drawn, self._weights)
            else:
                answers = self._channel.ask(query, drawn)
                mean = query.mechanism.combine(answers.value, answers.silos, self._weights)
                silos = answers.silos
        except Absent:
            if self.record:
                self.record.absent()
            raise
        if self.record:
            self.record.answered(query, silos, self._weights)
        if len(silos) < len(drawn):
            self._participation.missed(silos)
        return mean, silos

    def each(self) -> dict[int, Federation]:
        """Return a federation for each silo of one round, by the silo's number. It is for questions
        that differ between silos.
        """
        drawn = self._participation.draw()
        if self.record:
            self.record.roster(drawn)
        return {i: self._of(Fixed((i,))) for i in drawn}

    def cohort(self) -> Federation:
        """Return a federation of the silos of one round, which stay the same. An SVRG epoch must
        ask the silos that gave its anchor.
        """
        return self._of(Cohort(self._participation.draw()))

    def _of(self, participation: Everyone) -> Federation:
        """Return a federation with the same channel, weights and check, and another
        participation.
        """
        federation = type(self)(self._channel, participation, self._weights)
        federation.check = self.check
        federation.record = self.record
        return federation


class Fixed(Everyone):
    """Participation of the same silos in every round."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members

    def draw(self) -> tuple[int, ...]:
        """Return the members."""
        return self.members


class Cohort(Fixed):
    """Participation of an epoch's silos: the members that answer the first question, which gives
    the anchor.

    A silo that misses a later question is left out of that mean alone. If absence does not depend
    on the data, the mean of the other differences is still an unbiased estimate of the cohort's
    mean. Its error is at most that of the differences, which shrink with the move of w. A silo that
    gave no anchor would add the whole difference between silos instead.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        super().__init__(members)
        self._draws = 0

    def draw(self) -> tuple[int, ...]:
        """Return the members, and count the draw."""
        self._draws += 1
        return self.members

    def missed(self, answered: tuple[int, ...]) -> None:
        """Remove the members that did not answer the first question."""
        if self._draws == 1:
            self.members = answered
