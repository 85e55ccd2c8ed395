"""A trained model as one function of a row's own columns: fill in, clip, scale, one feature for
each category, the model, and what it says.

A schema has all of it. A file that was read without one has a schema of plain numbers. Texts stay
outside: a category is the place of its text in the schema's list, true is 1, false is 0, and a
missing value is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from silodp.core.features import maps
from silodp.core.features.feature_map import FeatureMap
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Column, Label, Schema
from silodp.core.problem.task import Task

ANY = (-float("inf"), float("inf"))
"""The range of a number that is neither clipped nor scaled."""


def plain_schema(
    features: Sequence[str],
    classes: Sequence[str],
    label: str,
    ranges: Sequence[Sequence[float]] | None = None,
) -> Schema:
    """What is known of a file that was read without a schema: numbers, with public ranges or none,
    and a class or a number to predict.
    """
    if ranges:
        pairs = [(float(low), float(high)) for low, high in ranges]
    else:
        pairs = [ANY] * len(features)
    columns = tuple(
        Column(name, "number", range=pair) for name, pair in zip(features, pairs, strict=True)
    )
    return Schema(columns, None, Label(Task.plain(len(classes)).kind, (label,), tuple(classes)))


def plain_text(
    features: Sequence[str], classes: Sequence[str], label: str, ranges: Tensor | None = None
) -> str:
    """The arguments of `plain_schema`, for a model's file."""
    pairs = None if ranges is None else ranges.tolist()
    return json.dumps(
        {"features": list(features), "classes": list(classes), "label": label, "ranges": pairs}
    )


class Reading(nn.Module):
    """Rows (n, columns) float64 to what is said of each (n, figures); of images the rows are their
    pixels within [-1, 1].
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        schema: Schema,
        problem: Problem,
        w: Tensor,
        scaling: tuple[Tensor, Tensor],
        mapped: FeatureMap | None = None,
    ) -> None:
        super().__init__()
        self.schema = schema
        self.task = schema.task
        self.mapped = mapped
        self.model = _with(problem, w)
        self.register_buffer("mean", scaling[0])
        self.register_buffer("scale", scaling[1])
        self.low, self.high = schema.label.range

    def features(self, rows: Tensor) -> Tensor:
        """What the model sees, (n, k) float32: the very numbers that it was trained on."""
        parts = [
            self._features(column, rows[:, j : j + 1])
            for j, column in enumerate(self.schema.columns)
        ]
        x = (torch.cat(parts, 1) if parts else rows).to(torch.float32)
        if self.mapped:
            own = self.mapped.function
            if isinstance(own, maps.Constants):
                x = maps.of(
                    self.mapped.text,
                    x.reshape(-1, *maps.shape_of(x.shape[1], self.mapped.shape)),
                    own,
                )
            else:
                x = torch.vmap(own)(x)
        return (x - self.mean) / self.scale

    def forward(self, rows: Tensor) -> Tensor:
        said = self.task.read(self.model(self.features(rows)))
        if self.task.kind == "regression":
            return self.low + (said + 1) / 2 * (self.high - self.low)
        return said

    def _features(self, column: Column, cell: Tensor) -> Tensor:
        gone = torch.isnan(cell)
        if column.type == "category":
            places = torch.arange(len(column.categories), dtype=cell.dtype)
            values = (cell == places).to(cell.dtype)
            said = column.missing is not None
        else:
            if column.type == "number":
                low, high = column.range
            else:
                low = 0.0
                high = 1.0
            filled = torch.where(gone, torch.full_like(cell, float(column.missing or 0)), cell)
            said = column.indicator
            if (low, high) == ANY:
                values = filled
            else:
                values = (2 * (filled.clamp(low, high) - low) / (high - low) - 1).clamp(-1, 1)
        if said:
            return torch.cat([values, gone.to(cell.dtype)], 1)
        return values


def _with(problem: Problem, w: Tensor) -> nn.Module:
    model = problem.model
    with torch.no_grad():
        for name, value in problem.split(w[0]).items():
            model.get_parameter(name).copy_(value)
    return model.eval().requires_grad_(False)


# --- in words ------------------------------------------------------------------------------------


def figures(schema: Schema) -> tuple[str, ...]:
    """What each number that a Reading gives is called."""
    label = schema.label
    return (
        tuple(f"risk_{c}" for c in label.classes)
        or tuple(f"risk_by_{edge:g}" for edge in label.edges)
        or ("value",)
    )


def default_threshold(schema: Schema) -> float | None:
    """Of two classes, the risk of the second from which it is predicted; None for any other label.

    By public facts alone: weights say what a mistake costs in each class, so that the second is
    worth saying from w0 / (w0 + w1) on.
    """
    if len(schema.label.classes) != 2:
        return None
    first, second = schema.label.weights or (1.0, 1.0)
    return first / (first + second)


def decided(schema: Schema, said: Tensor, threshold: float | None) -> list[str] | None:
    """The class that is predicted for each row, None where there are no classes: by the threshold,
    or by the largest weighted risk.
    """
    label = schema.label
    if not label.classes:
        return None
    usual = default_threshold(schema)
    if usual is not None:
        places = (said[:, 1] >= (usual if threshold is None else threshold)).long()
    else:
        places = (said * said.new_tensor(label.weights or (1.0,))).argmax(1)
    return [label.classes[k] for k in places.tolist()]


def sheet(schema: Schema) -> dict[str, Any]:
    """What whoever loads an export must know: the columns, in order, with what each may hold, and
    what the figures are.
    """
    columns = []
    for column in schema.columns:
        own = column.table() | {"name": column.name}
        columns.append({k: v for k, v in own.items() if not (k == "range" and column.range == ANY)})
    if columns:
        about: dict[str, Any] = {"columns": columns}
    else:
        about = {"images": list(schema.shape)}
    return (
        about
        | ({"missing_codes": list(schema.missing_codes)} if schema.missing_codes else {})
        | {
            "input": (
                "columns: float64 (rows, columns), in this order; a category is its place in the "
                "list, from 0; true is 1; missing is NaN"
            )
            if columns
            else "pixels: float64 (rows, channels x height x width), each 2 x value / 255 - 1",
            "figures": list(figures(schema)),
            "task": schema.label.task,
            "classes": list(schema.label.classes),
            "weights": list(schema.label.weights),
            "threshold": default_threshold(schema),
        }
    )
