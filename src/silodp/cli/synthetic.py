"""`silodp stats synthesise`, and the same over a federation: a synthetic table from a private
answer, for any number of later analyses.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.columns import SchemaFile, Silos
from silodp.cli.console import say, show, table
from silodp.cli.federation import Folder
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Json
from silodp.cli.recorded import Recorder, RecordIn, of_federation
from silodp.cli.score import (
    NOTHING,
    Charge,
    Colluding,
    Deadline,
    Delta,
    Pays,
    Seed,
    Trust,
    cards_of,
    once,
    one_question,
    tell,
)
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Form
from silodp.host import atomic
from silodp.host.cards import schema_of
from silodp.host.schema import load_schema

Rows = Annotated[int, typer.Option("--rows", help="Rows of the synthetic table.")]
Out = Annotated[Path, typer.Option("--out", help="The CSV file of the synthetic table.")]
Page = Annotated[
    Path | None,
    typer.Option(
        "--page", help="Also write a page that compares the table with what was released."
    ),
]


def synthesise(
    schema: SchemaFile = None,
    silo: Silos = None,
    rows: Rows = 1000,
    out: Out = Path("synthetic.csv"),
    page: Page = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """Write a synthetic table from a private answer of each silo. Every later analysis of the
    table is free.

    The table has the silos' own columns, units and categories, so commands that take --schema
    read it by the same one. `silodp synthesise` is short for it.

    Example: `silodp stats synthesise --schema schema.toml --silo a.csv --silo b.csv --epsilon 3
    --page synthetic.html`
    """
    from silodp.simulation.scoring import synthetic_data
    from silodp.simulation.source import Source

    _check_new(out)
    order = one_question(epsilon, delta, trust, colluding, seed)
    recorder = Recorder.into(record, "synthesise", rows=rows)
    source = Source(silos=tuple(silo or ()), schema=schema)
    form = load_schema(schema).form if schema else Form()
    with interruptible(NOTHING):
        answer = synthetic_data(order, source, rows)
    _tell(answer, form, out, page, as_json, recorder)


def federation_synthesise(
    folder: Folder = Path("federation"),
    rows: Rows = 1000,
    out: Out = Path("synthetic.csv"),
    page: Page = None,
    epsilon: Charge = 1.0,
    deadline: Deadline = 60.0,
    as_json: Json = False,
) -> None:
    """Write a synthetic table from a private answer of each silo of a federation. Their
    policies must allow it.

    Example: `silodp federation up --project . --allow-profile` and then
    `silodp federation synthesise --epsilon 3`
    """
    from silodp.server.estimates.grids import grids_of
    from silodp.server.estimates.synthetic import shares_of
    from silodp.server.estimates.synthetic import synthesise as synthesise_over

    _check_new(out)
    cards, budgets, _ = cards_of(folder, epsilon)
    schema = schema_of(cards[0])
    grids_of(schema, 2)
    assert schema is not None
    if cards[0].feature_map:
        raise BadInput(
            f"the feature map {cards[0].feature_map} of the silos' gates leaves no column of a "
            "record; ask gates without a feature map"
        )
    ask = partial(synthesise_over, schema=schema, rows=rows)
    shares = shares_of(schema)
    answer = once("synthesise", folder, cards, budgets, deadline, ask, shares=shares)
    _tell(answer, Form(), out, page, as_json, of_federation(folder, "synthesise", rows=rows))


def _check_new(out: Path) -> None:
    """Raise BadInput if the file exists, before anything is asked."""
    if os.path.lexists(out):
        raise BadInput(f"{out} exists, and silodp does not overwrite files; choose another --out")


def _tell(
    answer: dict[str, Any],
    form: Form,
    out: Path,
    page: Path | None,
    as_json: bool,
    recorder: Recorder,
) -> None:
    """Write the table and the page, and print how far they agree, with the price."""
    from silodp.cli.pages import put
    from silodp.pages.synthetic import page_of

    atomic.write_out(out, as_csv(answer.pop("table"), form).encode(form.encoding))
    if page:
        put(page, page_of(answer))
    tell(answer | {"out": str(out)}, as_json, show_synthetic, recorder)


def as_csv(columns: Mapping[str, Sequence[Any]], form: Form) -> str:
    """Return a table as CSV in the form that the schema states. A missing value is empty."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=form.separator, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_cell(value, form) for value in row])
    return text.getvalue()


def _cell(value: Any, form: Form) -> str:
    """Return the text of a cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}".replace(".", form.decimal)
    return str(value)


def show_synthetic(answer: Mapping[str, Any]) -> None:
    """Print how far the rows agree with what was released."""
    rows = []
    for column in answer["columns"]:
        worst = max(abs(cell["synthetic"] - cell["released"]) for cell in column["cells"])
        rows.append((column["column"], f"{worst:.1%}", f"{column['error']:.1%}"))
    title = f"{answer['rows']:,} synthetic rows, beside what was released"
    show(table("column|largest difference of a share>|noise>", rows, title=title))
    say(
        f"{answer['within']:.0%} of the shares are within their 95 % bound. The table is in "
        f"{answer['out']}.",
        "Do not use it for rare subgroups, for statements about single people, or for intervals "
        "that leave out the privacy noise.",
    )
