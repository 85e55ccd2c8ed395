"""`silodp table1` and `silodp stats quantiles`, and the same over a federation: columns by group,
with one price for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

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
from silodp.host.cards import schema_of

SchemaFile = Annotated[
    Path | None, typer.Option("--schema", help="The public schema of the files, in TOML.")
]
Silos = Annotated[
    list[Path] | None, typer.Option("--silo", help="One CSV, Parquet or NPZ file for each silo.")
]
By = Annotated[
    str | None,
    typer.Option("--by", help="A category or boolean column: one group for each of its values."),
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        help="The columns to show, separated by commas; by default all. Fewer have less noise.",
    ),
]
Out = Annotated[
    list[Path] | None,
    typer.Option(
        "--out", help="Also write a file: .md, .csv or .html, which has box plots. May be repeated."
    ),
]
FORMS = (".md", ".csv", ".html")


def table1(
    schema: SchemaFile = None,
    silo: Silos = None,
    by: By = None,
    columns: Columns = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    out: Out = None,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """Table 1 of a paper: counts, means (SD), medians [IQR], shares and missing values of every
    column, by group, under one price.

    `silodp table1` is short for it.

    Example: `silodp stats table1 --schema schema.toml --silo a.csv --silo b.csv --by ward
    --epsilon 1 --out table1.md`
    """
    _check_out(out)
    order = one_question(epsilon, delta, trust, colluding, seed)
    recorder = Recorder.into(record, "table1", by=by, columns=columns)
    answer = _asked(order, schema, silo, by, columns, numbers=False)
    _tell(answer, as_json, out, show_table1, recorder)


def quantiles(
    schema: SchemaFile = None,
    silo: Silos = None,
    by: By = None,
    columns: Columns = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    out: Out = None,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """Medians, quartiles and means of the number columns with 95 % intervals that include the
    privacy noise, by one question.

    Example: `silodp stats quantiles --schema schema.toml --silo a.csv --silo b.csv --epsilon 1
    --out boxes.html`
    """
    _check_out(out)
    order = one_question(epsilon, delta, trust, colluding, seed)
    recorder = Recorder.into(record, "quantiles", by=by, columns=columns)
    answer = _asked(order, schema, silo, by, columns, numbers=True)
    _tell(answer, as_json, out, show_quantiles, recorder)


def _asked(
    order: Any,
    schema: Path | None,
    silo: list[Path] | None,
    by: str | None,
    columns: str | None,
    *,
    numbers: bool,
) -> dict[str, Any]:
    """Return the answer in simulation."""
    from silodp.simulation.scoring import columns_data
    from silodp.simulation.source import Source

    source = Source(silos=tuple(silo or ()), schema=schema)
    with interruptible(NOTHING):
        return columns_data(order, source, by, listed(columns), numbers=numbers)


def listed(columns: str | None) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas."""
    if columns is None:
        return ()
    return tuple(name.strip() for name in columns.split(","))


def _check_out(out: list[Path] | None) -> None:
    """Raise BadInput for a file of an unknown form, before anything is asked."""
    for path in out or ():
        if path.suffix not in FORMS:
            raise BadInput(f"--out is {path}; its name must end in {', '.join(FORMS)}")


def _tell(
    answer: dict[str, Any],
    as_json: bool,
    out: list[Path] | None,
    shows: Any,
    recorder: Recorder,
) -> None:
    """Write the files, and print the answer with its price."""
    from silodp.cli.pages import put
    from silodp.pages import table1 as page

    forms = {".md": page.markdown, ".csv": page.as_csv, ".html": page.page_of}
    for path in out or ():
        put(path, forms[path.suffix](answer), over_any=path.suffix != ".html")
    tell(answer, as_json, shows, recorder)


def show_table1(answer: Mapping[str, Any]) -> None:
    """Print the table and its footnotes."""
    from silodp.pages import table1 as page

    first, level, *others = page.heading(answer)
    head = "|".join([f"{first}!", level, *(f"{name}>" for name in others)])
    by = f" by {answer['by']}" if answer["by"] else ""
    show(table(head, page.lines(answer), title=f"Table 1{by}, by one private release"))
    say(*page.footnotes(answer))


def show_quantiles(answer: Mapping[str, Any]) -> None:
    """Print medians, quartiles and means with their intervals."""
    rows = []
    for column in answer["columns"]:
        for own, group in zip(answer["groups"], column["groups"], strict=True):
            found = {q["level"]: q for q in group["quantiles"]}
            cells = [_with_interval(found[level]) for level in (0.25, 0.5, 0.75)]
            rows.append((column["column"], own["name"], *cells, _with_interval(group["mean"])))
    head = "column|group|first quartile>|median>|third quartile>|mean>"
    show(table(head, rows, title=f"{answer['records']:,} records, by one private release"))
    say("(a to b): the 95 % interval, which includes the privacy noise and the sampling error.")


def _with_interval(figure: Mapping[str, float]) -> str:
    """Return a figure with its interval."""
    return f"{figure['value']:.4g} ({figure['low']:.4g} to {figure['high']:.4g})"


# --- over a federation ---------------------------------------------------------------------------


def federation_table1(
    folder: Folder = Path("federation"),
    by: By = None,
    columns: Columns = None,
    epsilon: Charge = 1.0,
    deadline: Deadline = 60.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Table 1 of a paper over the silos of a federation, by one question of each. Their policies
    must allow it.

    Example: `silodp federation up --project . --allow-profile` and then `silodp federation table1
    --by ward --epsilon 1`
    """
    _check_out(out)
    answer = _over(folder, by, columns, epsilon, deadline, numbers=False)
    recorder = of_federation(folder, "table1", by=by, columns=columns)
    _tell(answer, as_json, out, show_table1, recorder)


def federation_quantiles(
    folder: Folder = Path("federation"),
    by: By = None,
    columns: Columns = None,
    epsilon: Charge = 1.0,
    deadline: Deadline = 60.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Medians, quartiles and means of the number columns over the silos of a federation. Their
    policies must allow it.

    Example: `silodp federation up --project . --allow-profile` and then
    `silodp federation quantiles --epsilon 1`
    """
    _check_out(out)
    answer = _over(folder, by, columns, epsilon, deadline, numbers=True)
    recorder = of_federation(folder, "quantiles", by=by, columns=columns)
    _tell(answer, as_json, out, show_quantiles, recorder)


def _over(
    folder: Path,
    by: str | None,
    columns: str | None,
    epsilon: float,
    deadline: float,
    *,
    numbers: bool,
) -> dict[str, Any]:
    """Return the answer of the silos of a federation."""
    from silodp.server.estimates.columns import chosen, columns_by_group

    cards, budgets, _ = cards_of(folder, epsilon)
    schema = schema_of(cards[0])
    names = chosen(schema, by, listed(columns), numbers=numbers)
    if cards[0].feature_map:
        raise BadInput(
            f"the feature map {cards[0].feature_map} of the silos' gates leaves no column of a "
            "record; ask gates without a feature map"
        )
    ask = partial(columns_by_group, schema=schema, names=names, by=by)
    words = [by, names]
    return once("columns", folder, cards, budgets, deadline, ask, words=words)
