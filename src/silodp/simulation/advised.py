"""What a simulation knows in public before it reads a record, for the advisor."""

from __future__ import annotations

from collections.abc import Sequence

from silodp.core.features.feature_map import feature_map
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.build import Load
from silodp.core.problem.task import Task
from silodp.server.advice import Advice, Facts, choose, kinds_of
from silodp.server.order import Order
from silodp.simulation.source import Loaded, Source


def advised(
    order: Order,
    source: Source,
    loaded: Loaded,
    names: Sequence[str],
    counts: Sequence[int],
    budgets: Sequence[Budget],
    load: Load,
) -> Advice:
    """The order with everything chosen that it leaves open, for silos that train on so many
    records.
    """
    features = loaded.records.features
    task = source.read_by or Task.plain(loaded.classes)
    if order.feature_map:
        if source.read_by:
            shape = source.read_by.shape
        else:
            shape = ()
        features = feature_map(order.feature_map, load, shape).width(features)
        if source.read_by:
            task = source.read_by.task
        else:
            task = task
    kinds = kinds_of(task, features, "number" if loaded.scale == "public" else "standard")
    if loaded.scale == "private":
        scaled = features
    else:
        scaled = None
    return choose(
        order, Facts(tuple(names), tuple(counts), kinds, task, tuple(budgets), scaled), load=load
    )
