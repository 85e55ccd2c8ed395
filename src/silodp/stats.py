"""Statistics over silos, for notebooks: `silodp.stats.survival(frames, schema="schema.toml")`.

Each function asks what the command `silodp stats` of the same name asks, by the same code and at
the same price. The silos are frames, or paths of files, by list or by name. This is a simulation:
all silos are in this process, and the answers are what they would have released.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.pages.table1 import heading, lines
from silodp.server.estimates.regression import model_of
from silodp.server.order import Order
from silodp.simulation.frames import by_schema, by_silo, order_of, schema_of
from silodp.simulation.scoring import (
    columns_data,
    estimate_data,
    logrank_data,
    profile_data,
    survival_data,
    synthetic_data,
)
from silodp.simulation.source import Source

Silos = Sequence[Any] | Mapping[str, Any]
SchemaLike = str | Path | Mapping[str, Any] | Schema
Ask = Callable[[Order, Source], dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """What the silos released, and its price."""

    table: pd.DataFrame
    """The figures, one row for each column, class or time."""
    details: dict[str, Any] = field(repr=False)
    """Everything that `silodp stats` prints with --json."""

    @property
    def spent(self) -> pd.DataFrame:
        """Return epsilon and delta that each silo has spent."""
        rows = [
            {"silo": row["name"], "epsilon": row["spent_epsilon"], "delta": row["delta"]}
            for row in self.details["silos"]
        ]
        return pd.DataFrame(rows).set_index("silo")

    def _repr_html_(self) -> str:
        """Return the table for notebooks."""
        return self.table.to_html()


def profile(silos: Silos, *, schema: SchemaLike, epsilon: Any = 1.0, **settings: Any) -> Answer:
    """Return means, deviations, ranges and missing rates of the features.

    - `silos`: one frame or file for each silo, in a list or by name.
    - `schema`: a path, table or Schema.
    - `epsilon`: the price of each silo, a number or a number by name.
    - `settings`: delta, trust, colluding and seed, as of `silodp stats`.
    """
    answer = ask(profile_data, silos, schema, epsilon, settings)
    return Answer(pd.DataFrame(answer["features"]).set_index("feature"), answer)


def survival(silos: Silos, *, schema: SchemaLike, epsilon: Any = 1.0, **settings: Any) -> Answer:
    """Return a Kaplan-Meier curve with its 95 % band. The arguments are those of `profile`."""
    answer = ask(survival_data, silos, schema, epsilon, settings)
    return Answer(pd.DataFrame(answer["curve"]).set_index("time"), answer)


def quantiles(
    silos: Silos,
    *,
    schema: SchemaLike,
    by: str | None = None,
    columns: Sequence[str] = (),
    epsilon: Any = 1.0,
    **settings: Any,
) -> Answer:
    """Return quantiles of the number columns with 95 % intervals, by group.

    - `by`: a category or boolean column; without it there is one group.
    - `columns`: the columns to ask for; by default all numbers.

    The other arguments are those of `profile`.
    """
    question = partial(columns_data, by=by, columns=columns, numbers=True)
    answer = ask(question, silos, schema, epsilon, settings)
    rows = [
        {"column": column["column"], "group": own["name"]} | quantile
        for column in answer["columns"]
        for own, group in zip(answer["groups"], column["groups"], strict=True)
        for quantile in group["quantiles"]
    ]
    return Answer(pd.DataFrame(rows).set_index(["column", "group", "level"]), answer)


def table1(
    silos: Silos,
    *,
    schema: SchemaLike,
    by: str | None = None,
    columns: Sequence[str] = (),
    epsilon: Any = 1.0,
    **settings: Any,
) -> Answer:
    """Return Table 1 of a paper as text: every column by group. `details` has the figures.

    The arguments are those of `quantiles`. By default all columns are asked for.
    """
    question = partial(columns_data, by=by, columns=columns)
    answer = ask(question, silos, schema, epsilon, settings)
    frame = pd.DataFrame(lines(answer), columns=heading(answer))
    return Answer(frame.set_index(["", "level"]), answer)


def synthesise(
    silos: Silos, *, schema: SchemaLike, rows: int = 1000, epsilon: Any = 1.0, **settings: Any
) -> Answer:
    """Return a synthetic table of so many rows. `details` has its agreement with what was released.

    The other arguments are those of `profile`. Every analysis of the table is free.
    """
    answer = ask(partial(synthetic_data, rows=rows), silos, schema, epsilon, settings)
    return Answer(pd.DataFrame(answer.pop("table")), answer)


def logistic(silos: Silos, *, schema: SchemaLike, epsilon: Any = 1.0, **settings: Any) -> Answer:
    """Return log odds ratios with 95 % intervals and p-values that include the privacy noise.

    The schema's label must have two classes. The first category of a column is the reference. The
    arguments are those of `profile`, and:

    - `columns`: the columns of the model, by default all.
    - `strata`: "silo" gives each silo its own level.
    """
    return _estimate("logistic", silos, schema, epsilon, settings)


def poisson(silos: Silos, *, schema: SchemaLike, epsilon: Any = 1.0, **settings: Any) -> Answer:
    """Return log rate ratios of a count. The arguments are those of `logistic`."""
    return _estimate("poisson", silos, schema, epsilon, settings)


def cox(silos: Silos, *, schema: SchemaLike, epsilon: Any = 1.0, **settings: Any) -> Answer:
    """Return log hazard ratios of a survival time. The arguments are those of `logistic`."""
    return _estimate("cox", silos, schema, epsilon, settings)


def logrank(
    silos: Silos, *, schema: SchemaLike, by: str, epsilon: Any = 1.0, **settings: Any
) -> Answer:
    """Return the log-rank test between the two groups of the column `by`."""
    answer = ask(partial(logrank_data, by=by), silos, schema, epsilon, settings)
    return Answer(pd.DataFrame(answer["groups"]).set_index("name"), answer)


def _estimate(
    kind: str, silos: Silos, schema: SchemaLike, epsilon: Any, settings: Mapping[str, Any]
) -> Answer:
    """Return the coefficients of a model. Raise BadInput if the schema's label defines another."""
    settings = dict(settings)
    columns = tuple(settings.pop("columns", ()))
    strata = settings.pop("strata", None)
    if strata not in (None, "silo"):
        raise BadInput(f"strata is {strata!r}; it must be 'silo', or left out")
    given = schema_of(schema)
    model = model_of(given, columns)
    if model.name != kind:
        raise BadInput(f"the label is of task {given.label.task!r}; use silodp.stats.{model.name}")
    question = partial(estimate_data, columns=columns, strata=bool(strata))
    answer = ask(question, silos, schema, epsilon, settings)
    return Answer(pd.DataFrame(answer["coefficients"]).set_index("name"), answer)


def ask(
    question: Ask, silos: Silos, schema: SchemaLike, epsilon: Any, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answer of these silos to a question of `simulation`, and its price.

    Raise BadInput for silos that are neither frames nor files, or for an unknown setting.
    """
    order = order_of({"epsilon": epsilon, **settings})
    return question(order, _source(silos, schema))


def _source(silos: Silos, schema: SchemaLike) -> Source:
    """Return the records of frames, or of files."""
    named = by_silo(silos)
    kinds = {isinstance(silo, pd.DataFrame) for silo in named.values()}
    if kinds == {True}:
        return by_schema(named, schema_of(schema))
    if kinds != {False}:
        raise BadInput("silos has frames and files, or nothing; give one kind for every silo")
    if not isinstance(schema, str | Path):
        raise BadInput("silos are files, but schema is not a path; give the path of the schema")
    return Source(silos=tuple(Path(silo) for silo in named.values()), schema=Path(schema))
