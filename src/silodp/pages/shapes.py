"""What an additive model has learnt: a curve for each number column, a weight for everything else,
and how much of each may be noise.

The model is public, and so is the size of the noise that went into it: nobody looked at a record.
"""

from __future__ import annotations

import math

import torch

from silodp.core.errors import BadInput
from silodp.core.problem.additive import Shapes
from silodp.core.problem.reading import ANY, figures
from silodp.host.model import Stored, open_model
from silodp.pages.charts import Series, chart
from silodp.pages.markup import Markup, section, table, tag
from silodp.pages.runs import Run
from silodp.runs import RunFolder

MOST = 6
"""Outputs of which a curve is drawn; more would hide each other."""
UNITS = {
    "binary": "log-odds of {}",
    "ordinal": "log-odds of a higher class",
    "regression": "{}",
    "count": "logarithm of the rate of {}",
}
STEPS = ("mb-sgd", "prox-sgd")
"""Algorithms whose last point is the start and all answers, each times the step."""


def shapes(run: Run) -> list[Markup]:
    """A section with the curves; none for another model, or where there is no model yet."""
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
    up = UNITS.get(label.task, "log-odds").format(
        label.classes[1] if label.task == "binary" else label.name
    )
    curves, (low, high) = (
        basis.curves(weight)[:MOST],
        (float(f(basis.curves(weight))) for f in (torch.min, torch.max)),
    )
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
    said = (
        f"What each column adds to the {up}. All curves have one scale, so that a flat one "
        "matters little."
    )
    if noise:
        said += (
            " The band is one standard deviation of the privacy noise, as if no later step had "
            "taken any of it back: it is at most so wide."
        )
    rest = []
    if basis.others:
        columns = basis.mix.shape[1] * len(basis.numbers)
        own = unit * noise
        rows = [
            (
                names[place],
                *(
                    f"{float(w[columns + i]):.3g}{f' ± {own:.2g}' if noise else ''}"
                    for w in weight[:MOST]
                ),
            )
            for i, place in enumerate(basis.others)
        ]
        rest = [
            table(
                "What else adds, where it holds",
                ("feature", *outputs[:MOST]),
                rows,
                numbers=range(1, len(rows[0])),
            )
        ]
    return [
        section(
            "shapes", "The curves", tag("p", said), tag("div", *drawn, class_="multiples"), *rest
        )
    ]


def spread(run: Run) -> float:
    """Standard deviation of the noise in each parameter, if no step bends what came before: step x
    (sum of variances)^(1/2); 0 where unknown.
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
        shares = {name: records[name] if whole == "records" else 1 for name in answers}
        total += (
            sum((shares[name] * noise) ** 2 for name, noise in answers.items())
            / sum(shares.values()) ** 2
            / question["dimension"]
        )
    return float(run.about["step"]) * math.sqrt(total)


def _knots(model: Stored, basis: Shapes, place: int) -> list[float]:
    """Where the knots lie, in the column's own unit."""
    column = next(c for c in model.schema.columns if c.name == model.schema.features[place])
    scaled = torch.linspace(-basis.reach, basis.reach, len(basis.mix), dtype=torch.float64)
    scaled = scaled * model.reading.scale[place] + model.reading.mean[place]
    if column.range == ANY:
        low = -1.0
        high = 1.0
    else:
        low, high = column.range
    return (low + (scaled + 1) / 2 * (high - low)).tolist()
