"""Define totals over silos that only the server adds up. Each silo masks its own numbers, so the
server can read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from silodp.core.errors import Refused
from silodp.core.fields import INTEGER
from silodp.core.mechanisms.totals import Shuffled

if TYPE_CHECKING:
    from silodp.core.statistics import Statistic

MODULUS_BITS = (32, 64)
"""The bits that a modulus may have."""


@dataclass(frozen=True, eq=False)
class Masked(Shuffled):
    """The totals of `Shuffled`, under masks that cancel in the sum over the query's cohort, modulo
    2^modulus (core.protocol.masks).

    `counted` are the silos of a gate's cohort whose shares the price counts on: all but those that
    may collude.

    Sensitivity: that of `Shuffled`. Adding modulo 2^modulus is post-processing of the sum of
    integers, and no total passes the modulus, which a gate checks.
    """

    modulus: int = 64

    wire: ClassVar = Shuffled.wire | {"modulus": INTEGER}
    masked = True

    def check(self, statistic: Statistic, runs: int, silos: int) -> None:
        super().check(statistic, runs, silos)
        if self.modulus not in MODULUS_BITS:
            raise Refused("modulus")
