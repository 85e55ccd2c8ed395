"""`silodp ledger`: for the data officer and the auditor. It shows who asked what, when, the price,
and the budget used. Only `create` reads records, because the ledger belongs to them.
"""

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
            "File with the ledger's count and head hash, if not beside the ledger. "
            "Best on another disk."
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
            help="The silo's CSV, Parquet or NPZ file. The ledger belongs to these records."
        ),
    ],
    epsilon: Annotated[
        float,
        typer.Option(help="Epsilon of each record, for all queries ever."),
    ],
    delta: Annotated[float | None, typer.Option(help="Delta; 1/n^2 by default.")] = None,
    rule: Annotated[
        str,
        typer.Option(help="gdp, renyi, renyi:ORDER or committed. It can never be changed."),
    ] = "gdp",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "With committed, once for each kind of release: "
                "full:NOISE_MULTIPLIER:COUNT or poisson:RATE:NOISE_MULTIPLIER:COUNT."
            )
        ),
    ] = None,
    label: LabelColumn = "label",
    classes: Classes = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Create the ledger of a data set, once. The command does not overwrite a ledger, and refuses
    records that already have one.

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
    if delta is None:
        delta = 1 / max(2, len(y)) ** 2
    budget = Budget(epsilon, delta)
    priced = rule_by_name(rule, schedule or [], budget)
    identity = Identity.of(*raw(loaded.cells[0]))
    made = DurableLedger.create(
        path, rule=priced, budget=budget, records=len(y), identity=identity, anchor=anchor
    )
    if as_json:
        return dump(summary_of(made))
    kept = f"Its count and head hash are in {made.anchor}"
    if anchor is None:
        kept += "; --anchor puts them on another disk"
    say(
        f"Made {made.path} for {len(y)} records: epsilon {epsilon:g}, delta "
        f"{rounded_up(budget.delta)}, {rule} rule. Nothing is spent yet.",
        f"{kept}.",
    )


def show_ledger(
    path: LedgerFile,
    last: Annotated[int, typer.Option(help="Number of the latest queries to list.", min=0)] = 20,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Show each query, its asker, time and price, and the share of the budget used.

    Example: `silodp ledger show clinic.ledger`
    """
    opened = ledger_at(path, anchor)
    summary = summary_of(opened)
    queries = queries_of(opened)
    if as_json:
        return dump(summary | {"runs": runs_of(opened, queries), "queries": queries})
    say(f"{path}: {said_of(summary)}", _bar(summary["used"]))
    if summary["closed"]:
        say(f"The ledger is closed: {summary['closed']}.")
    for hold in summary["holds"]:
        share = rounded_up(100 * hold["share"], 1, "f")
        asker = called(opened.path, hold["asker"])
        say(
            f"{share} % is reserved for run {hold['run'][:8]} of {asker}, for another "
            f"{hold['seconds']:.0f} seconds. It is not spent."
        )
    if not queries:
        return say("There are no queries yet.")
    latest = queries[max(0, len(queries) - last) :]
    asked = {(q["asker"], q["run"]) for q in latest}
    for run in (run for run in runs_of(opened, queries) if (run["asker"], run["run"]) in asked):
        study = ""
        if run["study"]:
            study = f", study {run['study']}"
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
    title = f"{len(queries)} questions"
    if len(latest) < len(queries):
        title += f", the latest {len(latest)}"
    show(
        table(
            "entry>!|when (UTC)!|run!|what|cost>!|left after>!|answer", rows, title=title, box=False
        )
    )
    say(HOLDS)
    if changes := [e for e in opened.entries() if e.act == "records"]:
        say(
            f"The records changed {len(changes)} times, last on "
            f"{changes[-1].time[:10]}. The budget stayed the same."
        )


def release(
    path: LedgerFile,
    run: Annotated[
        str | None,
        typer.Option(
            help=(
                "Only the reservation of this run: its name, or the digits at the "
                "start of a line of `silodp ledger show`."
            )
        ),
    ] = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Release budget that is reserved for runs, so that other runs can use it. Spent budget does
    not come back. A run that continues may reserve it again.

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
    if ended == 1:
        sentence = "Released 1 hold."
    elif ended:
        sentence = f"Released {ended} holds."
    else:
        sentence = "Nothing is reserved."
    tell({"released": ended, "runs": [hold.run for hold in found]}, as_json, sentence)


def verify(path: LedgerFile, anchor: Anchor = None, as_json: Json = False) -> None:
    """Verify the whole ledger: hashes, prices, totals, stored answers, anchor. Exit code 0, or 2
    with the reason.

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
    sentence = (
        f"{path} is intact: {count} entries, each with the correct hash, price and "
        f"total, and its anchor matches; head {head}."
    )
    if seen < count:
        sentence += (
            f" The anchor covers {seen} of them. The others were added later, by a "
            "process that was killed or by someone else."
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
        sentence,
    )


def export(
    path: LedgerFile,
    out_file: OutFile = None,
    form: Annotated[str, typer.Option("--format", help="jsonl or csv.")] = "jsonl",
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Write all entries with their hashes, for an auditor. The sketch of the records and the stored
    answers are left out.

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
    if out_file is None:
        text = io.StringIO()
        _write(rows, form, text)
        return put(text.getvalue())
    try:
        with out_file.open("x", newline="") as file:
            _write(rows, form, file)
    except FileExistsError:
        raise BadInput(f"{out_file} exists already; choose another name for --out") from None
    except OSError as error:
        raise BadInput(f"{out_file} cannot be written: {error.strerror}") from None
    answer = {"entries": len(rows), "file": str(out_file)}
    tell(answer, as_json, f"{len(rows)} entries are in {out_file}.")


def ledger_at(path: Path, anchor: Path | None, *, pin: bool = True) -> DurableLedger:
    """Open the ledger at `path` and check its chain and its anchor. The modules load only here, so
    that help is fast.
    """
    from silodp.silo.ledger.durable import DurableLedger

    return DurableLedger.open(path, anchor=anchor, pin=pin)


def _row(entry: Entry, count: int | None, head: str | None) -> dict[str, Any]:
    """Return an entry as it is hashed, with amounts in hexadecimal and as decimals.

    If the entry changed them, count and head of later releases are included.
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
    """Return a cell that a spreadsheet does not run as a formula. Askers chose some of these
    words.
    """
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@"):
        return f"'{value}"
    return value


def _bar(share: float) -> str:
    """Draw the spent share as full and the rest as empty. Any spend is at least one block, and so
    is any rest.
    """
    width = 40
    full = min(width, max(0, round(share * width)))
    if share > 0:
        full = max(full, 1)
    if share < 1:
        full = min(full, width - 1)
    return "█" * full + "░" * (width - full)
