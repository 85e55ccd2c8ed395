"""`silodp data`: the built-in data sets."""

from __future__ import annotations

from silodp.cli.console import Json, dump, show, table


def data(as_json: Json = False) -> None:
    """List the built-in data sets, for a first try.

    Example: `silodp data`
    """
    from silodp.silo.data.datasets import DATASETS

    rows = [
        {
            "name": d.name,
            "title": d.title,
            "records": d.records,
            "silos": d.silos,
            "embedded": d.embedded,
            "how_to_get": d.how_to_get,
        }
        for d in DATASETS.values()
    ]
    if as_json:
        return dump({"datasets": rows})
    shown = (
        (
            r["name"],
            r["title"],
            r["records"],
            r["silos"],
            "embedded" if r["embedded"] else r["how_to_get"],
        )
        for r in rows
    )
    show(table("name|what|records|silos|how to get it", shown))
