"""The port that algorithms ask: a mean of releases over the silos that take part in a round."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.query import Query, Release


class Channel(Protocol):
    """Carries one query to the named silos and brings their releases back, stacked on the silo axis."""

    def ask(self, query: Query, silos: Sequence[int]) -> Release: ...


class Port(Protocol):
    """What an algorithm may do."""

    def mean(self, query: Query) -> Tensor: ...
    def cohort(self) -> Port: ...


# --- who takes part -------------------------------------------------------------------------------------------------------------


class Everyone:
    """All N silos in every round."""

    def __init__(self, silos: int) -> None:
        self.silos = silos

    def draw(self) -> tuple[int, ...]:
        return tuple(range(self.silos))

    def rehearsal(self) -> Everyone:
        """Who is charged in a dry run, from the first round on."""
        return self


class Uniform(Everyone):
    """M of N uniformly at random (ass. 3 of the paper); with a `least`, M_r is itself uniform on [least, M].

    Nobody can know beforehand how often a silo will be available, so a dry run charges everyone for every round.
    """

    def __init__(self, silos: int, answering: int, *, seed: int, least: int | None = None) -> None:
        if not 1 <= (least or answering) <= answering <= silos:
            raise BadInput(f"{answering} of {silos} silos cannot take part; choose between 1 and {silos}")
        super().__init__(silos)
        self.answering, self.least = answering, least or answering
        self._random = np.random.default_rng(seed)

    def draw(self) -> tuple[int, ...]:
        size = int(self._random.integers(self.least, self.answering + 1))
        return tuple(sorted(self._random.choice(self.silos, size, replace=False).tolist()))

    def rehearsal(self) -> Everyone:
        return Everyone(self.silos)


class Balanced(Everyone):
    """M of N in random order, such that in R rounds no silo takes part more than ceil(R M / N) times.

    The order is drawn from public coins, so a dry run knows it and each silo's noise is calibrated to the rounds it really answers.
    """

    def __init__(self, silos: int, answering: int, *, seed: int) -> None:
        if not 1 <= answering <= silos:
            raise BadInput(f"{answering} of {silos} silos cannot take part; choose between 1 and {silos}")
        super().__init__(silos)
        self.answering, self.seed = answering, seed
        self._draws = self._order()

    def _order(self) -> Iterator[tuple[int, ...]]:
        """Deals silos from a shuffled pack; the next pack is shuffled so that nobody is dealt twice in one round."""
        random = np.random.default_rng(self.seed)
        pack: list[int] = []
        while True:
            if len(pack) < self.answering:
                fresh = random.permutation(self.silos).tolist()
                late = [s for s in fresh if s not in pack]
                pack += late + [s for s in fresh if s not in late]
            hand, pack = pack[: self.answering], pack[self.answering :]
            yield tuple(sorted(hand))

    def draw(self) -> tuple[int, ...]:
        return next(self._draws)

    def rehearsal(self) -> Balanced:
        return Balanced(self.silos, self.answering, seed=self.seed)

    def most(self, rounds: int) -> int:
        return math.ceil(rounds * self.answering / self.silos)


# --- the port -------------------------------------------------------------------------------------------------------------------


class Federation:
    """Asks whoever takes part in this round and averages what they release."""

    def __init__(self, channel: Channel, participation: Everyone) -> None:
        self._channel, self._participation = channel, participation

    def mean(self, query: Query) -> Tensor:
        """(J, d): the mean over the answering silos, each with weight 1 / M_r as in the paper."""
        return self._channel.ask(query, self._participation.draw()).value.mean(1)

    def cohort(self) -> Federation:
        """The silos of one round, held fixed: an SVRG epoch must ask those who gave its anchor."""
        return Federation(self._channel, Fixed(self._participation.draw()))


class Fixed(Everyone):
    """The same silos again and again."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members

    def draw(self) -> tuple[int, ...]:
        return self.members
