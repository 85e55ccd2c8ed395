"""How good a model is, from one total over silos, which a shuffler has added or masks hide the
parts of: the figures of `scoring`, for all held-out records together.

The server sees no silo's own scores, so there is nothing by silo; for that the noise is that of one
sum over all records and not of one a silo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Masked, Shuffled
from silodp.core.mechanisms.shuffle import Parameters, variance
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.protocol.masks import modulus_for
from silodp.core.query import Query
from silodp.core.statistics import ScoreTotal
from silodp.core.weights import Weights
from silodp.server.estimates.scoring import Scores, asked_of, scores_of
from silodp.server.federation import Channel, Everyone, StopRun
from silodp.server.shuffled import Kind, P, ShuffledFederation, numerical

KIND = "score"


def shuffled_for(
    w: Tensor,
    budget: Budget,
    counts: Sequence[int],
    least: int | None = None,
    colluding: int | None = None,
    **asked: Any,
) -> Query:
    """The one question, with the least noise at which it takes the whole budget if no total of
    fewer than `least` silos is passed on.

    With `colluding` the total is masked, and counts on the noise of all but so many silos.

    `counts` are the records whose noise is in a total; what is asked for is as of
    `scoring.asked_of`.
    """
    about, unit = asked_of(**asked)
    statistic = ScoreTotal(w, about.cells, about.cap / unit)
    released = sum(sorted(counts)[: (least or len(counts)) - (colluding or 0)])
    levels, bits = numerical(
        (Kind(KIND, 1, 1 / gdp_mu(budget)),), released, statistic.shape[-1], budget
    )[KIND]
    made = Shuffled(KIND, statistic.norm, levels, bits, released, P)
    return Query(
        statistic,
        made
        if colluding is None
        else Masked(**vars(made), modulus=modulus_for(sum(counts) * (levels + bits))),
    )


def score_total(
    channel: Channel, query: Query, *, counts: Sequence[int], held_out: Sequence[int], **asked: Any
) -> list[Scores]:
    """Figures over all held-out records, from the total that the channel brings; all silos must be
    in it.
    """
    statistic = query.statistic
    m = query.mechanism
    others = tuple(
        n - held for n, held in zip(counts, held_out, strict=True)
    )  # they are in the total as zeros, with their noise
    fed = ShuffledFederation(
        channel, Everyone(len(counts)), Weights("records", tuple(counts), others)
    )
    try:
        value = fed.mean(query)[0].double().cpu() + statistic.centre
    except StopRun as stop:
        if stop.codes:
            logs = "; the gates' logs say why, and their policies must allow ScoreTotal"
        else:
            logs = ""
        raise BadInput(f"there is no total of the scores: {stop}{logs}") from None
    records = sum(counts)
    held = sum(held_out)
    own = (
        math.sqrt(
            variance(Parameters(int(m.levels), int(m.noise_bits), m.p), records, float(m.clip))
        )
        * records
        / held
    )
    return [scores_of("all", held, value.numpy(), own, asked_of(**asked)[0])]
