"""What an additive model has learnt: a curve for each number column, a weight for every other
feature, and how much of each may be noise.

The model is public, and so is the size of its noise. No record is read.
"""

from __future__ import annotations

import math

import torch

from silodp.core.errors import BadInput
from silodp.core.problem.models import Shapes
from silodp.core.problem.reading import ANY, figures
from silodp.host.model import Stored, open_model
from silodp.pages.charts import Series, chart
from silodp.pages.markup import Markup, section, table, tag
from silodp.pages.runs import Run
from silodp.runs import RunFolder

MOST = 6
"""The most outputs with a curve. More curves would hide each other."""
UNITS = {
    "binary": "log-odds of {}",
    "ordinal": "log-odds of a higher class",
    "regression": "{}",
    "count": "logarithm of the rate of {}",
}
STEPS = ("mb-sgd", "prox-sgd")
"""Algorithms whose last point is the start plus the sum of all answers times the step."""


def shapes(run: Run) -> list[Markup]:
    """Show the curves as a section. Return none for another kind of model, or before there is a
    model.
    """
    if (
        not str(run.about.get("model") or "").startswith("additive")
        or not RunFolder(run.folder).model.is_file()
    ):
        return []
    try:
        model = open_model(run.folder)
    except BadInput as error:
        return [section("shapes", "The curves", tag("p", f"They cannot be drawn: {error}."))]
    basis = model.reading.model[0]  # type: ignore[index]
    last = model.reading.model[1]  # type: ignore[index]
    assert isinstance(basis, Shapes)
    noise = spread(run)
    label = model.schema.label
    names = model.schema.features
    if label.task == "regression":
        unit = (label.range[1] - label.range[0]) / 2
    else:
        unit = 1.0
    weight = last.weight.detach().double() * unit
    if len(weight) > 1:
        outputs = figures(model.schema)[: len(weight)]
    else:
        outputs = ("adds",)
    predicted = label.name
    if label.task == "binary":
        predicted = label.classes[1]
    up = UNITS.get(label.task, "log-odds").format(predicted)
    curves = basis.curves(weight)[:MOST]
    low = float(torch.min(basis.curves(weight)))
    high = float(torch.max(basis.curves(weight)))
    if noise:
        width = unit * noise * basis.mix.norm(dim=1)
    else:
        width = torch.zeros(len(basis.mix))
    low = low - float(width.max())
    high = high + float(width.max())
    drawn = []
    for j, place in enumerate(basis.numbers):
        across = _knots(model, basis, place)
        series = []
        for k, (name, values) in enumerate(zip(outputs, curves[:, j].tolist(), strict=False)):
            if noise and len(curves) == 1:
                band = [(v - w, v + w) for v, w in zip(values, width.tolist(), strict=True)]
            else:
                band = ()
            series.append(Series(name, list(zip(across, values, strict=True)), k, band=band))
        drawn.append(
            chart(names[place], "", series, across="", up=up, shape="small", low=low, top=high)
        )
    words = (
        f"What each column adds to the {up}. All curves share one scale, so a flat "
        "curve matters little."
    )
    if noise:
        words += (
            " The band is one standard deviation of the privacy noise. It is an upper "
            "bound: it assumes that no later step has removed any noise."
        )
    rest = []
    if basis.others:
        columns = basis.mix.shape[1] * len(basis.numbers)
        error = ""
        if noise:
            error = f" ± {unit * noise:.2g}"
        rows = []
        for i, place in enumerate(basis.others):
            added = (f"{float(w[columns + i]):.3g}{error}" for w in weight[:MOST])
            rows.append((names[place], *added))
        rest = [
            table(
                "What the other features add",
                ("feature", *outputs[:MOST]),
                rows,
                numbers=range(1, len(rows[0])),
            )
        ]
    return [
        section(
            "shapes", "The curves", tag("p", words), tag("div", *drawn, class_="multiples"), *rest
        )
    ]


def spread(run: Run) -> float:
    """Return the standard deviation of the noise in each parameter, or 0 where it is unknown.

    It is step x (sum of variances)^(1/2), and assumes that no step changes earlier noise.
    """
    records = {silo.name: silo.records or 0 for silo in run.silos}
    whole = run.about.get("weights", "equal")
    if run.algorithm not in STEPS or whole not in ("equal", "records") or not run.about.get("step"):
        return 0.0
    total = 0.0
    for question in run.rounds:
        answers = {name: answer.get("noise") for name, answer in question["answered"].items()}
        if not question.get("noise") or question["statistic"] != "Grad":
            continue
        if None in answers.values():  # a total: over records already
            total += question["noise"] ** 2 / question["dimension"]
            continue
        shares = dict.fromkeys(answers, 1)
        if whole == "records":
            shares = {name: records[name] for name in answers}
        total += (
            sum((shares[name] * noise) ** 2 for name, noise in answers.items())
            / sum(shares.values()) ** 2
            / question["dimension"]
        )
    return float(run.about["step"]) * math.sqrt(total)


def _knots(model: Stored, basis: Shapes, place: int) -> list[float]:
    """Return the places of the knots, in the column's own unit."""
    column = next(c for c in model.schema.columns if c.name == model.schema.features[place])
    scaled = torch.linspace(-basis.reach, basis.reach, len(basis.mix), dtype=torch.float64)
    scaled = scaled * model.reading.scale[place] + model.reading.mean[place]
    if column.range == ANY:
        low = -1.0
        high = 1.0
    else:
        low, high = column.range
    return (low + (scaled + 1) / 2 * (high - low)).tolist()
