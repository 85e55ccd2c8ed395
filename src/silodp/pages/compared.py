"""Alone, together and personal, in the report of a simulation. Never in an archive of evidence."""

from __future__ import annotations

from silodp.core import local_figures
from silodp.host.plain_files import json_in
from silodp.pages.markup import Markup, section, table, tag
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
    return [
        section(
            "compared",
            "Alone, together, personal",
            tag("p", local_figures.RAW, class_="lead"),
            tag("p", local_figures.verdict(found["all"])),
            table("Records held out", heads, rows, numbers=tuple(range(2, len(heads)))),
            tag("p", " ".join(meanings), class_="soft small"),
        )
    ]
