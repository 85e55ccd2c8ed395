"""`silodp ledger`: for the data officer and the auditor. Who asked what, when, what it cost and
what is left; nothing here reads a record but `create`, which needs to know whose budget it is."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli.console import (
    Classes,
    Json,
    LabelColumn,
    dump,
    item,
    put,
    say,
    show,
    table,
    tell,
)
from silodp.core.errors import BadInput
from silodp.core.figures import HOLDS, left_of, rounded_up
from silodp.silo.ledger.view import queries_of, rule_by_name, said_of, summary_of
from silodp.silo.service.names import called, runs_of

if TYPE_CHECKING:
    from silodp.silo.ledger.chain import Entry
    from silodp.silo.ledger.durable import DurableLedger

LedgerFile = Annotated[Path, typer.Argument(help="The ledger's file.", show_default=False)]
Anchor = Annotated[
    Path | None,
    typer.Option(
        help=(
            "Where the ledger's count and head hash are kept, if not where it was made; best "
            "on another disk."
        )
    ),
]
OutFile = Annotated[
    Path | None, typer.Option("--out", help="File to write; the screen by default.")
]


def create(
    path: LedgerFile,
    data: Annotated[
        Path,
        typer.Option(
            help="The silo's CSV, Parquet or NPZ file: the ledger belongs to these records."
        ),
    ],
    epsilon: Annotated[
        float,
        typer.Option(help="Epsilon for each record, over everything that will ever be asked."),
    ],
    delta: Annotated[float | None, typer.Option(help="Delta; 1/n^2 by default.")] = None,
    rule: Annotated[
        str,
        typer.Option(help="gdp, renyi, renyi:ORDER or committed; fixed for good."),
    ] = "gdp",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "For committed, once for each kind of release: full:NOISE_MULTIPLIER:COUNT or "
                "poisson:RATE:NOISE_MULTIPLIER:COUNT."
            )
        ),
    ] = None,
    label: LabelColumn = "label",
    classes: Classes = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Make the ledger of a data set, once. Refuses to overwrite one, and records that have a ledger
    already.

    Example: `silodp ledger create clinic.ledger --data clinic.csv --label outcome --epsilon 3
    --anchor /mnt/other/clinic.anchor`
    """
    from silodp.core.privacy.accounting import Budget
    from silodp.silo.data.files import load_silos
    from silodp.silo.data.tables import raw
    from silodp.silo.ledger.durable import DurableLedger, Identity

    if classes is None:
        declared = None
    elif classes == "number":
        declared = ()
    else:
        declared = tuple(classes.split(","))
    loaded = load_silos([data], label, classes=declared)
    y = loaded.records_raw[0][1]
    budget = Budget(epsilon, delta if delta is not None else 1 / max(2, len(y)) ** 2)
    priced = rule_by_name(rule, schedule or [], budget)
    identity = Identity.of(*raw(loaded.cells[0]))
    made = DurableLedger.create(
        path, rule=priced, budget=budget, records=len(y), identity=identity, anchor=anchor
    )
    if as_json:
        return dump(summary_of(made))
    say(
        (
            f"Made {made.path} for {len(y)} records: epsilon {epsilon:g}, delta "
            f"{rounded_up(budget.delta)}, {rule} rule; nothing is spent."
        ),
        f"Its count and head hash are kept in {made.anchor}"
        + ("." if anchor else "; --anchor puts them on another disk."),
    )


def show_ledger(
    path: LedgerFile,
    last: Annotated[int, typer.Option(help="How many of the latest queries to list.", min=0)] = 20,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Who asked what, when, what it cost, and what is left.

    Example: `silodp ledger show clinic.ledger`
    """
    opened = ledger_at(path, anchor)
    summary = summary_of(opened)
    queries = queries_of(opened)
    if as_json:
        return dump(summary | {"runs": runs_of(opened, queries), "queries": queries})
    say(
        f"{path}: {said_of(summary)}",
        f"{_bar(summary['used'])} {left_of(summary['used'])} of the budget is left.",
    )
    if summary["closed"]:
        say(f"The ledger is closed: {summary['closed']}.")
    for hold in summary["holds"]:
        share = rounded_up(100 * hold["share"], 1, "f")
        asker = called(opened.path, hold["asker"])
        say(
            f"{share} % is held for run {hold['run'][:8]} of {asker}, for "
            f"{hold['seconds']:.0f} seconds more; it is not spent."
        )
    if not queries:
        return say("Nothing has been asked yet.")
    if last < len(queries):
        latest = queries[len(queries) - last :]
    else:
        latest = queries
    asked = {(q["asker"], q["run"]) for q in latest}
    for run in (run for run in runs_of(opened, queries) if (run["asker"], run["run"]) in asked):
        if run["study"]:
            study = f", study {run['study']}"
        else:
            study = ""
        share = rounded_up(100 * run["cost"], 2, "f")
        item(
            run["run"][:8],
            f"{run['asked_by']}{study}: {run['questions']} questions, {share} % of the budget",
        )
    rows = (
        (
            q["entry"],
            q["time"][:16].replace("T", " "),
            q["run"][:8],
            q["kind"],
            f"{rounded_up(100 * q['cost'], 3, 'f')}%",
            left_of(1 - q["left"], 2),
            q["answer"],
        )
        for q in latest
    )
    title = f"{len(queries)} questions" + (
        f", the latest {len(latest)}" if len(latest) < len(queries) else ""
    )
    show(
        table(
            "entry>!|when (UTC)!|run!|what|cost>!|left after>!|answer", rows, title=title, box=False
        )
    )
    say(HOLDS)
    if changes := [e for e in opened.entries() if e.act == "records"]:
        say(
            f"The records changed {len(changes)} times, last on {changes[-1].time[:10]}; "
            "the budget went on."
        )


def release(
    path: LedgerFile,
    run: Annotated[
        str | None,
        typer.Option(
            help=(
                "Only what is held for this run, by its name or the digits that `silodp ledger "
                "show` begins with."
            )
        ),
    ] = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Release what is held for runs, so that others may have it. Nothing that was spent comes back,
    and a run that goes on may hold it anew.

    Example: `silodp ledger release clinic.ledger`
    """
    from silodp.silo.ledger import reserve

    opened = ledger_at(path, anchor)
    found = [
        o.hold
        for o in reserve.listed(opened)
        if run is None or run == o.hold.run or (len(run) >= 8 and o.hold.run.startswith(run))
    ]
    ended = reserve.release(opened, [hold.id for hold in found])
    if ended:
        said = f"Released {ended} {'hold' if ended == 1 else 'holds'}."
    else:
        said = "Nothing is held."
    tell({"released": ended, "runs": [hold.run for hold in found]}, as_json, said)


def verify(path: LedgerFile, anchor: Anchor = None, as_json: Json = False) -> None:
    """Check the whole ledger: hashes, prices, totals, stored answers, anchor. Exit code 0, or 2 and
    what is wrong.

    Example: `silodp ledger verify clinic.ledger`
    """
    try:
        opened = ledger_at(path, anchor, pin=False)
        seen, (count, head) = opened.verify(), opened.head()
    except BadInput as error:
        if not as_json:
            raise
        dump({"ok": False, "why": str(error)})
        raise typer.Exit(2) from None
    said = (
        f"{path} is whole: {count} entries, each with the hash, price and total it should "
        f"have, as its anchor says; head {head}."
    )
    if seen < count:
        said += (
            f" Of these the anchor has seen {seen}: the rest came after it, as where a process "
            "was killed, or by another hand."
        )
    tell(
        {
            "ok": True,
            "entries": count,
            "anchored": seen,
            "head": head,
            "anchor": str(opened.anchor),
        },
        as_json,
        said,
    )


def export(
    path: LedgerFile,
    out_file: OutFile = None,
    form: Annotated[str, typer.Option("--format", help="jsonl or csv.")] = "jsonl",
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """All entries with their hashes, for an auditor; without the sketch of the records and the
    stored answers.

    Example: `silodp ledger export clinic.ledger --format csv --out clinic-ledger.csv`
    """
    if form not in ("jsonl", "csv"):
        raise BadInput(f"--format is {form!r}; it must be jsonl or csv")
    opened = ledger_at(path, anchor)
    counts = {entry: count for count, (entry, _) in enumerate(opened.released_heads())}
    heads = dict(opened.released_heads())
    rows = [_row(e, counts.get(e.sequence), heads.get(e.sequence)) for e in opened.entries()]
    if as_json and out_file is None:
        return dump(summary_of(opened) | {"entries": rows})
    try:
        with out_file.open("x", newline="") if out_file else io.StringIO() as file:
            _write(rows, form, file)
            if isinstance(file, io.StringIO):
                put(file.getvalue())
    except FileExistsError:
        raise BadInput(f"{out_file} exists already; choose another name for --out") from None
    except OSError as error:
        raise BadInput(f"{out_file} cannot be written: {error.strerror}") from None
    if out_file:
        tell(
            {"entries": len(rows), "file": str(out_file)},
            as_json,
            f"{len(rows)} entries are in {out_file}.",
        )


def ledger_at(path: Path, anchor: Path | None, *, pin: bool = True) -> DurableLedger:
    """The ledger at `path`, its chain and its anchor checked; what that takes is loaded here, so
    that help is quick.
    """
    from silodp.silo.ledger.durable import DurableLedger

    return DurableLedger.open(path, anchor=anchor, pin=pin)


def _row(entry: Entry, count: int | None, head: str | None) -> dict[str, Any]:
    """As it is hashed, amounts in hexadecimal, with their decimal values beside them, and the count
    and head that releases had from it on, if it changed them.
    """
    row = asdict(entry)
    return row | {
        "amount": entry.amount.hex(),
        "total": entry.total.hex(),
        "amount_decimal": entry.amount,
        "total_decimal": entry.total,
        "released_count": count,
        "released_head": head,
    }


def _write(rows: list[dict[str, Any]], form: str, file: Any) -> None:
    from silodp.silo.ledger.chain import COLUMNS

    if form == "jsonl":
        file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    more = ["amount_decimal", "total_decimal", "released_count", "released_head"]
    writer = csv.DictWriter(file, [*COLUMNS, *more], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in row.items()} for row in rows)


def _harmless(value: Any) -> Any:
    """A spreadsheet runs a cell that begins like a formula, and some of these words were chosen by
    whoever asked.
    """
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@"):
        return f"'{value}"
    return value


def _bar(share: float) -> str:
    """Spent is full, left is empty; a little spent is never drawn as nothing, nor a little left as
    all spent.
    """
    width = 40
    full = min(width, max(0, round(share * width)))
    full = max(full, 1) if share > 0 else full
    full = min(full, width - 1) if share < 1 else full
    return "█" * full + "░" * (width - full)
