"""`silodp predict`, `silodp export model` and `silodp export card`: from a trained model to its
use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, complain, dump, put, say, show, table, tell
from silodp.cli.project import Project
from silodp.host import atomic

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A run's folder, or its model.safetensors.", show_default=False
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="The folder of a run of --algorithm one-shot.", show_default=False
    ),
]
Code = Annotated[
    str | None,
    typer.Option("--model", help="Your copy of FILE.py:FUNCTION, where the model was made by one."),
]
Map = Annotated[
    str | None,
    typer.Option("--feature-map", help="Your copy of FILE.py:NAME, where there was a feature map."),
]


def predict(
    trained: Model,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="CSV, Parquet or NPZ without a label, or a folder of images.",
            show_default=False,
        ),
    ],
    threshold: Annotated[
        float | None,
        typer.Option(
            help=(
                "Of two classes: the second is predicted from this risk on; by default w0 / "
                "(w0 + w1) of the schema's weights, or 0.5."
            )
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="A column of the file to put first, such as a record number; may be repeated."
        ),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="A new CSV file; by default the table is printed.")
    ] = None,
    model: Code = None,
    feature_map: Map = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Risks for new records, by a trained model: a line for each row of the file, in its order. It
    costs nothing and sends nothing.

    The columns are read by the schema that is kept with the model; a label, and other columns, may
    be there and are not used. Risks are those of the classes themselves: public weights that the
    schema gives them are taken back out.

    Examples: `silodp predict runs/train new.csv` · `silodp predict runs/train new.csv --threshold
    0.2 --keep id --out risks.csv`
    """
    from silodp.core.problem.reading import default_threshold
    from silodp.host.model import PERSONAL, open_model
    from silodp.silo.predict import predict as predicted

    opened = open_model(trained, {"model": model, "feature_map": feature_map}, personal=True)
    rows_of, notes = predicted(opened, file, threshold=threshold, keep=tuple(keep or ()))
    if PERSONAL in opened.about:
        notes.append(
            f"This is the personal model of {opened.about[PERSONAL]}: not private, so "
            "never send it."
        )
    if threshold is None:
        used = default_threshold(opened.schema)
    else:
        used = threshold
    if out_file:
        atomic.write_out(out_file, rows_of.to_csv(index=False, float_format="%.7g"))
    if as_json:
        if out_file:
            rows = {}
        else:
            rows = {"rows": rows_of.to_dict("records")}
        return dump(
            {
                "count": len(rows_of),
                "threshold": used,
                "notes": notes,
                "out": str(out_file) if out_file else None,
            }
            | rows
        )
    if out_file:
        if used is None:
            decided = ""
        else:
            decided = (
                f"; {opened.schema.label.classes[1]} is predicted from a risk of {used:.4g} on"
            )
        say(f"Wrote {len(rows_of)} predictions to {out_file}{decided}.")
    else:
        put(rows_of.to_csv(index=False, float_format="%.7g"))
    for note in notes:
        complain(note)


def export_model(
    trained: Model,
    to: Annotated[str, typer.Option(help="onnx (needs silodp[onnx]), torch or sklearn.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Path without a suffix; `model` in the run's folder by default."),
    ] = None,
    model: Code = None,
    feature_map: Map = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """The model in a form that needs no silodp, from raw columns to risks, with a .json of its
    columns, ranges and categories.

    onnx and torch (`torch.export.load(FILE).module()`) take float64 (rows, columns) in the .json's
    order: a category is its place in the list, true is 1, a missing value is NaN. sklearn is a .py
    with a .npz beside it, which takes pandas frames as they are.

    Examples: `silodp export model runs/train --to onnx` · `silodp export model runs/train --to
    sklearn --out risk/readmission`
    """
    from silodp.host.model import open_model
    from silodp.server.export.forms import export as written

    opened = open_model(trained, {"model": model, "feature_map": feature_map})
    paths = written(opened, to, out or opened.path.with_suffix(""))
    tell(
        {"to": to, "files": list(map(str, paths))}, as_json, f"Wrote {', '.join(map(str, paths))}."
    )


def card(
    run: Annotated[
        Path,
        typer.Argument(
            help="The folder of a finished `silodp train` or `federation run`.", show_default=False
        ),
    ],
    use: Annotated[
        str, typer.Option(help="What the model is for, and for whom, in your words.")
    ] = "",
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="A new markdown file; by default the card is printed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A model card in markdown: what was learnt, for what use, what it cost each silo's records,
    how good it is, what is not protected.

    Examples: `silodp export card runs/train` · `silodp export card runs/train --use "Triage of
    adults in emergency wards" --out CARD.md`
    """
    from silodp.pages import runs
    from silodp.pages.card import card as written
    from silodp.pages.card import facts

    found = runs.read(run)
    text = written(found, use)
    if out_file:
        atomic.write_out(out_file, text)
    if as_json:
        return dump(
            {"privacy": facts(found), "out": str(out_file) if out_file else None, "card": text}
        )
    say(f"Wrote {out_file}.") if out_file else put(text)


def estimate(run: Run, as_json: Json = False) -> None:
    """The coefficients of a linear regression, with intervals and p-values that include the privacy
    noise. It costs nothing: the run has paid.

    Each is the change of what is predicted, in its own unit, with one unit of the column (or with
    yes instead of no). What repeated sampling and noise around the estimate cover is measured, and
    an interval is called 95 % only where that is so and no record was scaled down.

    Example: `silodp stats estimate runs/train`
    """
    from silodp.host.model import open_model
    from silodp.server.estimates.intervals import estimated, sentence

    found = estimated(run, open_model(run, {}))
    if as_json:
        return dump(found)
    rows = (
        (
            row["name"],
            *(
                f"{row[name]:.4g}"
                for name in ("estimate", "error", "noise", "low", "high", "p_value")
            ),
            f"{row['coverage']:.1%}",
        )
        for row in found["coefficients"]
    )
    show(
        table(
            "column|estimate>|std. error>|of it noise>|low>|high>|p>|coverage>",
            rows,
            title=found["title"],
        )
    )
    say(sentence(found))
