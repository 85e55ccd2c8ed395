"""The public facts of a simulation, for the advisor. They are known before a record is read."""

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
    """Return the advisor's choices for everything that the order leaves open. `counts` are the
    numbers of records that the silos train on.
    """
    features = loaded.records.features
    task = source.read_by or Task.plain(loaded.classes)
    if order.feature_map:
        shape = ()
        if source.read_by:
            shape = source.read_by.shape
            task = source.read_by.task
        features = feature_map(order.feature_map, load, shape).width(features)
    if loaded.scale == "public":
        kind_of_column = "number"
    else:
        kind_of_column = "standard"
    kinds = kinds_of(task, features, kind_of_column)
    if loaded.scale == "private":
        scaled = features
    else:
        scaled = None
    return choose(
        order, Facts(tuple(names), tuple(counts), kinds, task, tuple(budgets), scaled), load=load
    )
