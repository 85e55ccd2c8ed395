"""The table of alone, together and personal, in words: one for terminal, report and notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEANING = {
    "alone": "fitted to this silo's own records, without the shared model",
    "together": "the shared model as it is",
    "personal": "the shared model, fitted further to this silo's own records",
}
RAW = (
    "Computed on raw records, without noise: for the analyst's own data only. These figures are "
    "not private. Do not publish or send them."
)
ALL = "all silos"
SMALL = 5e-5
"""A difference of losses that is not shown."""
FORMS = {
    "auc": ("AUC", ".3f"),
    "accuracy": ("accuracy", ".3f"),
    "c-index": ("c-index", ".3f"),
    "r2": ("R2", ".3f"),
    "deviance explained": ("deviance explained", ".3f"),
    "calibration slope": ("slope", ".2f"),
    "mean predicted": ("predicted", ".4g"),
    "mean observed": ("observed", ".4g"),
}
"""How figures are called and written. Losses keep their names, and get four digits."""

Table = Mapping[str, Mapping[str, float | None]]
"""Figures by name, for alone, together and personal."""


def columns(tables: Sequence[Table]) -> tuple[str, ...]:
    """Return the names of the figures' columns."""
    return tuple(FORMS.get(name, (name,))[0] for name in _names(tables))


def rows(table: Table) -> list[tuple[str, ...]]:
    """Return a row of texts for each model: its name and its figures."""
    names = _names([table])
    return [(model, *(_text(name, own[name]) for name in names)) for model, own in table.items()]


def verdict(table: Table) -> str:
    """Return a sentence that compares the losses of the three models."""
    loss = _names([table])[0]
    alone = table["alone"][loss]
    together = table["together"][loss]
    personal = table["personal"][loss]
    if alone is None or together is None or personal is None:
        return f"The {loss} cannot be computed on these records."
    if alone <= together:
        better = "alone"
    else:
        better = "together"
    change = personal - min(alone, together)
    if abs(change) < SMALL:
        return f"The personal model's {loss} is that of the better other model ({better})."
    if change < 0:
        side = "below"
    else:
        side = "above"
    return (
        f"The personal model's {loss} is {abs(change):.4f} {side} that of the better other model "
        f"({better})."
    )


def _names(tables: Sequence[Table]) -> tuple[str, ...]:
    return tuple(next(iter(tables[0].values())))


def _text(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:{FORMS.get(name, (name, '.4g'))[1]}}"
