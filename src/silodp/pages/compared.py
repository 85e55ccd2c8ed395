"""Alone, together and personal, in the report of a simulation. Never in an archive of evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from silodp.core import local_figures
from silodp.host.plain_files import json_in
from silodp.pages.markup import Markup, folded, section, table, tag
from silodp.pages.runs import Run
from silodp.runs import RunFolder


def compared(run: Run) -> list[Markup]:
    """Return one section, or nothing where the run kept no records out of training."""
    found = json_in(RunFolder(run.folder).comparison)
    if not found.get("all"):
        return []
    tables = [
        (local_figures.ALL, found["all"]),
        *((silo["name"], silo["figures"]) for silo in found["silos"]),
    ]
    rows = [(name, *row) for name, one in tables for row in local_figures.rows(one)]
    heads = ("silo", "model", *local_figures.columns([found["all"]]))
    meanings = [f"{name}: {words}." for name, words in local_figures.MEANING.items()]
    every = table("Held-out records", heads, rows, numbers=tuple(range(2, len(heads))))
    return [
        section(
            "compared",
            "Alone, together, personal",
            tag("p", local_figures.verdict(found["all"]), class_="lead"),
            _by_loss(tables, heads[2]),
            tag("p", " ".join(meanings), class_="soft small"),
            tag("p", local_figures.RAW, class_="note"),
            folded("compared", "Every figure of the three models", every),
        )
    ]


def _by_loss(tables: Sequence[tuple[str, Mapping[str, Any]]], loss: str) -> Markup:
    """Show the loss of the three models of each silo side by side, the smallest in bold."""
    rows = []
    for name, models in tables:
        figures = {model: own[loss] for model, own in models.items()}
        known = [value for value in figures.values() if value is not None]
        cells = []
        for value in figures.values():
            if value is None:
                cells.append("-")
            elif value == min(known):
                cells.append(tag("b", f"{value:.4g}"))
            else:
                cells.append(f"{value:.4g}")
        rows.append((name, *cells))
    heads = ("silo", *tables[0][1])
    caption = f"The {loss} of each model on held-out records: smaller is better"
    return table(caption, heads, rows, numbers=range(1, len(heads)))
