"""Turn a trained model into one function of a row's own columns.

It fills in missing values, clips, scales, makes one feature for each category, applies the model
and reads its outputs. A schema defines all of this. A file without a schema gets a schema of plain
numbers.

The function takes numbers only. A category is the place of its text in the schema's list. True is
1, false is 0 and a missing value is NaN.
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
    """Return the schema of a file that was read without one.

    Its columns are numbers, with public ranges or none. It predicts a class or a number.
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
    """Return the arguments of `plain_schema` as text, for a model's file."""
    if ranges is None:
        pairs = None
    else:
        pairs = ranges.tolist()
    return json.dumps(
        {"features": list(features), "classes": list(classes), "label": label, "ranges": pairs}
    )


class Reading(nn.Module):
    """The function from rows (n, columns) in float64 to predictions (n, figures).

    The rows of images are their pixels within [-1, 1].
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
        """Return what the model sees, (n, k) in float32.

        In training it saw exactly these numbers.
        """
        parts = [
            self._features(column, rows[:, j : j + 1])
            for j, column in enumerate(self.schema.columns)
        ]
        if parts:
            x = torch.cat(parts, 1).to(torch.float32)
        else:
            x = rows.to(torch.float32)
        if self.mapped:
            function = self.mapped.function
            if isinstance(function, maps.Constants):
                shape = maps.shape_of(x.shape[1], self.mapped.shape)
                x = maps.of(self.mapped.text, x.reshape(-1, *shape), function)
            else:
                x = torch.vmap(function)(x)
        return (x - self.mean) / self.scale

    def forward(self, rows: Tensor) -> Tensor:
        """Return the predictions of rows, a number in the label's units."""
        predictions = self.task.read(self.model(self.features(rows)))
        if self.task.kind == "regression":
            return self.low + (predictions + 1) / 2 * (self.high - self.low)
        return predictions

    def _features(self, column: Column, cell: Tensor) -> Tensor:
        """Return the features (n, k) of one column's cells (n, 1)."""
        missing = torch.isnan(cell)
        if column.type == "category":
            places = torch.arange(len(column.categories), dtype=cell.dtype)
            values = (cell == places).to(cell.dtype)
            indicator = column.missing is not None
        else:
            if column.type == "number":
                low, high = column.range
            else:
                low = 0.0
                high = 1.0
            filled = torch.where(missing, torch.full_like(cell, float(column.missing or 0)), cell)
            indicator = column.indicator
            if (low, high) == ANY:
                values = filled
            else:
                values = (2 * (filled.clamp(low, high) - low) / (high - low) - 1).clamp(-1, 1)
        if indicator:
            return torch.cat([values, missing.to(cell.dtype)], 1)
        return values


def _with(problem: Problem, w: Tensor) -> nn.Module:
    """Return the problem's model with the parameters w, in evaluation mode."""
    model = problem.model
    with torch.no_grad():
        for name, value in problem.split(w[0]).items():
            model.get_parameter(name).copy_(value)
    return model.eval().requires_grad_(False)


# --- in words ------------------------------------------------------------------------------------


def figures(schema: Schema) -> tuple[str, ...]:
    """Return the name of each number that a Reading gives."""
    label = schema.label
    return (
        tuple(f"risk_{c}" for c in label.classes)
        or tuple(f"risk_by_{edge:g}" for edge in label.edges)
        or ("value",)
    )


def default_threshold(schema: Schema) -> float | None:
    """Return the risk of the second of two classes from which it is predicted.

    Return None for any other label. The threshold depends on public facts alone. Weights are the
    cost of a mistake in each class, so it is best to predict the second class from w0 / (w0 + w1)
    on.
    """
    if len(schema.label.classes) != 2:
        return None
    first, second = schema.label.weights or (1.0, 1.0)
    return first / (first + second)


def decided(schema: Schema, risks: Tensor, threshold: float | None) -> list[str] | None:
    """Return the predicted class of each row, or None if there are no classes.

    Two classes are decided by the threshold, more classes by the largest weighted risk.
    """
    label = schema.label
    if not label.classes:
        return None
    usual = default_threshold(schema)
    if usual is None:  # more than two classes, where no threshold applies
        places = (risks * risks.new_tensor(label.weights or (1.0,))).argmax(1)
    else:
        if threshold is None:
            threshold = usual
        places = (risks[:, 1] >= threshold).long()
    return [label.classes[k] for k in places.tolist()]


def sheet(schema: Schema) -> dict[str, Any]:
    """Return what a user of an export needs.

    That is the columns in order with what each may contain, and the meaning of the figures.
    """
    columns = []
    for column in schema.columns:
        fields = column.table() | {"name": column.name}
        if column.range == ANY:
            fields.pop("range", None)
        columns.append(fields)
    facts: dict[str, Any]
    if columns:
        facts = {"columns": columns}
        rows = (
            "columns: float64 (rows, columns), in this order; a category is its place in the "
            "list, from 0; true is 1; missing is NaN"
        )
    else:
        facts = {"images": list(schema.shape)}
        rows = "pixels: float64 (rows, channels x height x width), each 2 x value / 255 - 1"
    if schema.missing_codes:
        facts["missing_codes"] = list(schema.missing_codes)
    return facts | {
        "input": rows,
        "figures": list(figures(schema)),
        "task": schema.label.task,
        "classes": list(schema.label.classes),
        "weights": list(schema.label.weights),
        "threshold": default_threshold(schema),
    }
