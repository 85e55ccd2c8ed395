"""What a model uses: the effect of each column on the prediction, and how much of it may be noise.

The model is public, and so is the size of its noise. No record is read: the model is asked about
made-up rows, in which one column moves and all others stay in the middle of their public ranges.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.problem.models import Shapes
from silodp.core.problem.reading import ANY, figures
from silodp.core.problem.schema import Column
from silodp.host.model import Stored, open_model
from silodp.pages.charts import Series, chart, whiskers
from silodp.pages.markup import Markup, folded, section, table, tag
from silodp.pages.runs import Run
from silodp.runs import RunFolder

MOST = 6
"""The most outputs with a curve. More curves would hide each other."""
CURVES = 12
"""The most columns with a curve, and the most rows of the chart of effects."""
POINTS = 17
"""Places of a curve, where the model does not have knots of its own."""
REACH = 3.0
"""Standard deviations to which a curve reaches, for a column without a public range."""
LARGE = 20_000
"""Parameters above which no effects are shown: such a model is for images or texts."""
Z = 1.96
UNITS = {
    "binary": "log-odds of {}",
    "ordinal": "log-odds of a higher class",
    "regression": "{}",
    "count": "logarithm of the rate of {}",
}
BAND = (
    "The band contains the model's value for 95 % of the draws of the privacy noise. It does not "
    "include the error from the limited number of records. It is an upper bound if the steps are "
    "stable, because it assumes that no later step removes noise."
)
OF_NETWORK = (
    " For this model it is approximate: it follows from how steeply the outputs change with the "
    "parameters."
)
NO_BAND = "There is no band: the size of the noise in this model's parameters is not in its folder."
LINEAR = (nn.Linear, nn.Flatten, Shapes)


@dataclass(frozen=True)
class Moves:
    """One column's effect: for each place, its name, its number, the effect (outputs) and the
    standard deviation of the noise in it.
    """

    column: str
    places: tuple[str, ...]
    at: tuple[float, ...]
    effect: Tensor
    """(places, outputs), less that of the base row."""
    noise: Tensor
    """As `effect`; 0 where it is unknown."""

    @property
    def size(self) -> float:
        """Return the largest difference between two places."""
        return float((self.effect.max(0).values - self.effect.min(0).values).max())


@dataclass(frozen=True)
class Effects:
    """The effects of all columns of a model, on the scale on which it adds up."""

    outputs: tuple[str, ...]
    up: str
    curves: tuple[Moves, ...]
    steps: tuple[Moves, ...]
    """Categories, booleans and missing values, and the numbers of a linear model: each against its
    base.
    """
    banded: bool
    exact: bool
    """Whether the outputs are linear in the parameters."""


def effects(run: Run) -> list[Markup]:
    """Show the effects as a section. Return none before there is a model, and for a model of other
    things than columns.
    """
    file = RunFolder(run.folder).model
    if not file.is_file() or run.kind == "compare":
        return []
    heading = "What the model uses"
    try:
        found = _found(run.folder, file.stat().st_mtime_ns, _spread(run))
    except BadInput as error:
        return [section("effects", heading, tag("p", f"It cannot be shown: {error}."))]
    if found is None:
        return []
    parts = [tag("p", _words(found))]
    if found.curves:
        parts.append(_drawn(found))
    if found.steps:
        parts += _listed(found)
    meaning = NO_BAND
    if found.banded:
        meaning = BAND
        if not found.exact:
            meaning += OF_NETWORK
    parts.append(tag("p", meaning, class_="soft small"))
    return [section("effects", heading, *parts)]


def _words(found: Effects) -> str:
    """Return what the figures show, and which columns stand out from the noise."""
    words = f"What each column adds to the {found.up}."
    if found.curves:
        words += (
            " Each curve is relative to the middle of its range. All share one scale, so a flat "
            "curve matters little."
        )
    if not found.banded:
        return words
    clear = [moves.column for moves in (*found.curves, *found.steps) if _clear(moves)]
    clear = list(dict.fromkeys(clear))
    if not clear:
        return f"{words} No column stands out from the privacy noise."
    more = ""
    if len(clear) > CURVES:
        more = f" and {len(clear) - CURVES} more"
    return f"{words} Clear of the privacy noise: {', '.join(clear[:CURVES])}{more}."


def _clear(moves: Moves) -> bool:
    """Return whether the band excludes no effect at some place."""
    return bool((moves.effect.abs() > Z * moves.noise).any())


def _drawn(found: Effects) -> Markup:
    """Draw a curve for each of the columns with the largest effects."""
    shown = sorted(found.curves, key=lambda moves: -moves.size)[:CURVES]
    shown = [moves for moves in found.curves if moves in shown]
    ends = [
        (moves.effect + side * Z * moves.noise)[:, :MOST] for moves in shown for side in (-1, 1)
    ]
    low = min(float(values.min()) for values in ends)
    high = max(float(values.max()) for values in ends)
    drawn = []
    for moves in shown:
        series = []
        for k, name in enumerate(found.outputs[:MOST]):
            values = moves.effect[:, k].tolist()
            band = ()
            if found.banded and len(found.outputs) == 1:
                widths = (Z * moves.noise[:, k]).tolist()
                band = [(v - w, v + w) for v, w in zip(values, widths, strict=True)]
            points = list(zip(moves.at, values, strict=True))
            series.append(Series(name, points, k, band=band))
        drawn.append(
            chart(
                moves.column, "", series, across="", up=found.up, shape="small", low=low, top=high
            )
        )
    return tag("div", *drawn, class_="multiples")


def _listed(found: Effects) -> list[Markup]:
    """List the effects of the other columns: in a chart, and every number in a table."""
    rows = []
    for moves in found.steps:
        for i, place in enumerate(moves.places):
            values = moves.effect[i, :MOST].tolist()
            widths = (Z * moves.noise[i, :MOST]).tolist()
            rows.append((f"{moves.column}: {place}", values, widths))
    rows.sort(key=lambda row: -abs(row[1][0]))
    cells = [
        (name, *(_number(v, w, banded=found.banded) for v, w in zip(values, widths, strict=True)))
        for name, values, widths in rows
    ]
    listed = table(
        "Effect of each change", ("change", *found.outputs[:MOST]), cells, numbers=range(1, 9)
    )
    if len(found.outputs) > 1:
        return [listed]
    drawn = whiskers(
        f"Change in the {found.up}",
        "The largest effects first. Left of the line lowers the prediction, right of it raises it.",
        [(name, values[0], widths[0]) for name, values, widths in rows[:CURVES]],
    )
    return [drawn, folded("effects", "Every effect in numbers", listed)]


def _number(value: float, width: float, *, banded: bool) -> str:
    if not banded:
        return f"{value:.3g}"
    return f"{value:.2f} ({value - width:.2f} to {value + width:.2f})"


# --- the model -----------------------------------------------------------------------------------


def _spread(run: Run) -> tuple[float, ...]:
    """Return the standard deviation of the noise in each parameter, or one for all. Return nothing
    where it is unknown.

    The last question of a run stretches the model's outputs, and so the noise in them.
    """
    spread = run.summary.get("spread")
    if spread is None:
        return ()
    slope = float((run.summary.get("recalibration") or {}).get("slope", 1.0))
    if not str(run.about.get("model")).startswith(("linear", "logistic", "additive")):
        slope = max(1.0, slope)
    if isinstance(spread, list):
        return tuple(slope * float(part) for part in spread)
    return (slope * float(spread),)


@functools.lru_cache(maxsize=64)
def _found(folder: Path, changed: int, spread: tuple[float, ...]) -> Effects | None:
    """Return the effects of the model that was written to the folder at this time."""
    model = open_model(folder)
    if not model.schema.columns or model.reading.mapped:
        return None
    module = model.reading.model
    if sum(p.numel() for p in module.parameters()) > LARGE:
        return None
    layers = [part for part in module.modules() if not list(part.children())]
    additive = all(isinstance(layer, LINEAR) for layer in layers)
    lines = additive and not any(isinstance(layer, Shapes) for layer in layers)
    outputs, up, unit = _scale(model)
    base = torch.tensor([[_base(column) for column in model.schema.columns]], dtype=torch.float64)
    curves = []
    steps = []
    for j, column in enumerate(model.schema.columns):
        for places, values, is_curve in _rows(model, layers, column, j, lines=lines):
            rows = base.repeat(len(values), 1)
            rows[:, j] = torch.tensor(values, dtype=torch.float64)
            start = base.clone()
            if lines and column.type == "number" and not is_curve and len(values) == 1:
                start[0, j] = _ends(model, column, j)[0]
            effect, noise = _effect(model, rows, start, spread)
            moves = Moves(column.name, places, tuple(values), unit * effect, unit * noise)
            if is_curve:
                curves.append(moves)
            else:
                steps.append(moves)
    return Effects(outputs, up, tuple(curves), tuple(steps), bool(spread), additive)


def _rows(
    model: Stored, layers: Sequence[nn.Module], column: Column, j: int, *, lines: bool
) -> list[tuple[tuple[str, ...], list[float], bool]]:
    """Return what to ask of one column: names of the places, their numbers, and whether they are a
    curve. A straight line is one step, from the lowest to the highest value.
    """
    found = []
    low, high = _ends(model, column, j)
    if column.type == "number" and lines:
        found.append(((f"{high:.4g} instead of {low:.4g}",), [high], False))
    elif column.type == "number":
        basis = next((layer for layer in layers if isinstance(layer, Shapes)), None)
        count = POINTS
        if basis:
            count = len(basis.mix)
        places = torch.linspace(low, high, count, dtype=torch.float64).tolist()
        found.append((tuple(f"{place:.4g}" for place in places), places, True))
    elif column.type == "boolean":
        found.append((("yes instead of no",), [1.0], False))
    else:
        first, *others = column.categories
        names = tuple(f"{category} instead of {first}" for category in others)
        if names:
            found.append((names, [float(k) for k in range(1, len(column.categories))], False))
    if len(column.features) > max(1, len(column.categories)):  # one feature marks missing values
        found.append((("missing",), [float("nan")], False))
    return found


def _ends(model: Stored, column: Column, j: int) -> tuple[float, float]:
    """Return the lowest and the highest value of a column, in its own unit."""
    if column.range != ANY:
        return column.range
    mean = float(model.reading.mean[j])
    scale = float(model.reading.scale[j])
    return mean - REACH * scale, mean + REACH * scale


def _base(column: Column) -> float:
    """Return a public value of a column: the middle of its range, no, or the first category."""
    if column.type == "number" and column.range != ANY:
        return sum(column.range) / 2
    return 0.0


def _effect(
    model: Stored, rows: Tensor, base: Tensor, spread: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Return how far the outputs (rows, outputs) of the rows are from those of the base, and the
    standard deviation of the noise in that.

    The noise of the parameters reaches the outputs by their derivatives, which is exact for a model
    that is linear in its parameters.
    """
    module = model.reading.model
    features = model.reading.features(torch.cat([base, rows]))
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    names = list(parameters)
    sizes = [parameters[name].numel() for name in names]

    def outputs(w: Tensor) -> Tensor:
        parts = dict(zip(names, w.split(sizes), strict=True))
        shaped = {name: part.reshape(parameters[name].shape) for name, part in parts.items()}
        z = torch.func.functional_call(module, shaped, (features,))
        return _difference(z[1:] - z[:1], model)

    w = torch.cat([parameters[name].flatten() for name in names])
    effect = outputs(w).double()
    if not spread:
        return effect, torch.zeros_like(effect)
    slopes = torch.func.jacrev(outputs)(w).double()
    deviations = torch.tensor(spread, dtype=torch.float64).expand(len(w))
    return effect, (slopes * deviations).square().sum(-1).sqrt()


def _difference(z: Tensor, model: Stored) -> Tensor:
    """Return the outputs that are shown: of two classes the second against the first, of ordered
    classes one, since all thresholds move alike.
    """
    if model.schema.label.task == "binary" and z.shape[1] == 2:
        return z[:, 1:] - z[:, :1]
    if model.schema.label.task == "ordinal":
        return z[:, :1]
    return z


def _scale(model: Stored) -> tuple[tuple[str, ...], str, float]:
    """Return the names of the outputs, what they add up to, and the unit of one."""
    label = model.schema.label
    predicted = label.name
    if label.task == "binary":
        predicted = label.classes[1]
    up = UNITS.get(label.task, "log-odds").format(predicted)
    unit = 1.0
    if label.task == "regression":
        unit = (label.range[1] - label.range[0]) / 2
    if label.task in ("multiclass", "survival"):
        return figures(model.schema), up, unit
    return ("effect",), up, unit
