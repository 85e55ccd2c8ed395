"""`silodp estimate`: what the moments of a run say of each column, in the columns' and the label's own units."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Column
from silodp.server.estimates.intervals import REPEATS, SOUND, coverage, never_scaled, of_bought
from silodp.server.estimates.moments import bought


def estimated(folder: Path, opened: Any) -> dict[str, Any]:
    """For --json: a row for the constant and each feature. `opened` is the run's model with its schema and scaling."""
    found, schema = bought(folder), opened.schema
    names = list(schema.features)
    if len(names) != found.gram.features:
        raise BadInput(
            f"the run in {folder} was on features that a map has made, whose coefficients have no columns; leave --feature-map out"
        )
    made, measured = of_bought(found), coverage(found)
    low, high = schema.label.range
    unit = found.gram.cap * (high - low) / 2
    halves = [half for column in schema.columns for half in _halves(column)]
    scale = [unit, *(unit / (half * float(s)) for half, s in zip(halves, opened.reading.scale.tolist(), strict=True))]
    rows = []
    for j, name in enumerate(["constant", *names]):
        parts = {"estimate": made.value, "error": made.error, "noise": made.noise, "low": made.low, "high": made.high}
        row = {key: float(part[0, j]) * scale[j] for key, part in parts.items()}
        row["estimate"] += (low + high) / 2 * (j == 0)
        row["low"], row["high"] = (row[key] + (low + high) / 2 * (j == 0) for key in ("low", "high"))
        rows.append({"name": name} | row | {"p_value": float(made.p_value[0, j]), "coverage": float(measured[j])})
    called = never_scaled(found.gram) and all(SOUND[0] <= row["coverage"] <= SOUND[1] for row in rows)
    return {
        "title": "Coefficients with 95 % intervals" if called else "Coefficients with intervals that are not called 95 %",
        "called_95": called, "never_scaled": never_scaled(found.gram), "records": float(found.records), "repeats": REPEATS, "coefficients": rows,
    }  # fmt: skip


def _halves(column: Column) -> list[float]:
    """How much of the column's own unit one unit of each of its features is."""
    low, high = column.range
    own = {"number": (high - low) / 2 if math.isfinite(high - low) else 1.0, "boolean": 0.5, "category": 1.0}[column.type]
    return [own] * (len(column.categories) or 1) + [1.0] * (len(column.features) - (len(column.categories) or 1))


def sentence(found: dict[str, Any]) -> str:
    """How the intervals are to be taken."""
    told = f"Coverage is measured: of {found['repeats']:,} repeats of sampling and noise around the estimate, the share whose interval holds it."
    if found["called_95"]:
        return told
    if not found["never_scaled"]:
        return told + " Long records were scaled down by the clip, which only makes intervals wider; train with --clip 2 for none to be."
    return told + " It is not 95 % here: the noise is large beside what the columns say."
