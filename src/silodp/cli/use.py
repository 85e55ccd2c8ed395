"""`silodp predict`, `silodp export model` and `silodp export card`: use a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silodp.cli.console import Json, complain, dump, put, say, tell
from silodp.cli.project import Project
from silodp.core.errors import BadInput
from silodp.host import atomic

if TYPE_CHECKING:
    from silodp.host.model import Stored

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A run's folder, or its model.safetensors.", show_default=False
    ),
]
Code = Annotated[
    str | None,
    typer.Option(
        "--model", help="Your copy of FILE.py:FUNCTION, if such a function made the model."
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--feature-map", help="Your copy of FILE.py:NAME, if there was such a feature map."
    ),
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
                "For two classes: the smallest risk at which the second is predicted. "
                "Default w0 / (w0 + w1) of the schema's weights, or 0.5."
            )
        ),
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(
            help="Instead of a threshold: how many false alarms cost as much as one missed case."
        ),
    ] = None,
    sensitivity: Annotated[
        float | None,
        typer.Option(
            help="Instead of a threshold: the share of cases to find, such as 0.9, by the last "
            "evaluation of the run."
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="A column of the file to copy to the front, such as a record number; may "
            "be repeated."
        ),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="A new CSV file. By default the table is printed.")
    ] = None,
    model: Code = None,
    feature_map: Map = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Compute risks for new records with a trained model: one line for each row of the file, in the
    same order. The command costs no privacy and sends nothing.

    The columns are read by the schema stored with the model. A label and other columns may be
    present and are not used. Risks are those of the classes themselves: the effect of public class
    weights in the schema is removed.

    A threshold can follow from costs or from a wanted sensitivity. The command then prints what it
    implies, by the last evaluation of the run.

    Examples: `silodp predict runs/train new.csv` · `silodp predict runs/train new.csv --threshold
    0.2 --keep id --out risks.csv` · `silodp predict runs/train new.csv --sensitivity 0.9`
    """
    from silodp.core.problem.reading import default_threshold
    from silodp.host.model import PERSONAL, open_model
    from silodp.silo.predict import predict as predicted

    opened = open_model(trained, {"model": model, "feature_map": feature_map}, personal=True)
    threshold, implied = _threshold(opened, threshold, cost_ratio, sensitivity)
    rows_of, notes = predicted(opened, file, threshold=threshold, keep=tuple(keep or ()))
    mode = 0o644
    if PERSONAL in opened.about:
        mode = 0o600
        notes.append(
            f"This is the personal model of {opened.about[PERSONAL]}. It is not "
            "private, so never send it."
        )
    used = threshold
    if threshold is None:
        used = default_threshold(opened.schema)
    if out_file:
        atomic.write_out(out_file, rows_of.to_csv(index=False, float_format="%.7g"), mode=mode)
    if as_json:
        answer = {"count": len(rows_of), "threshold": used, "notes": notes, "out": None}
        if implied:
            answer["implied"] = implied
        if out_file:
            answer["out"] = str(out_file)
        else:
            answer["rows"] = rows_of.to_dict("records")
        return dump(answer)
    if out_file:
        decided = ""
        if used is not None:
            second = opened.schema.label.classes[1]
            decided = f"; {second} is predicted for a risk of {used:.4g} or more"
        say(f"Wrote {len(rows_of)} predictions to {out_file}{decided}.")
    else:
        put(rows_of.to_csv(index=False, float_format="%.7g"))
    for note in [*implied, *notes]:
        complain(note)


def _threshold(
    opened: Stored, threshold: float | None, cost_ratio: float | None, sensitivity: float | None
) -> tuple[float | None, list[str]]:
    """Return the threshold that is chosen, and what it implies. BadInput if it is chosen twice."""
    from silodp.core.decisions import by_cost, by_sensitivity, implied
    from silodp.host.plain_files import lines_in
    from silodp.runs import RunFolder

    chosen = [value for value in (threshold, cost_ratio, sensitivity) if value is not None]
    if not chosen:
        return None, []
    if len(chosen) > 1:
        raise BadInput("give one of --threshold, --cost-ratio and --sensitivity, not several")
    if len(opened.schema.label.classes) != 2 and threshold is None:
        raise BadInput("the label is not one of two classes; leave --cost-ratio, --sensitivity out")
    evaluations = lines_in(RunFolder(opened.path.parent).evaluations)
    scored = [found["scores"][0] for found in evaluations if found.get("scores")]
    thresholds = scored[-1].get("thresholds", []) if scored else []
    if sensitivity is not None:
        threshold = by_sensitivity(thresholds, sensitivity)
    elif cost_ratio is not None:
        threshold = by_cost(cost_ratio)
    assert threshold is not None
    words = implied(thresholds, threshold)
    if not words:
        words = ["What this threshold implies is not known: no evaluation has measured it."]
    return threshold, words


def export_model(
    trained: Model,
    to: Annotated[str, typer.Option(help="onnx (needs silodp[onnx]), torch or sklearn.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Path without a suffix. Default `model` in the run's folder."),
    ] = None,
    model: Code = None,
    feature_map: Map = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Write the model in a form that needs no silodp, from raw columns to risks. A .json beside it
    lists columns, ranges and categories.

    onnx and torch (`torch.export.load(FILE).module()`) take float64 (rows, columns) in the .json's
    order. A category is its place in the list, true is 1, and a missing value is NaN. sklearn is a
    .py with a .npz, and takes pandas frames as they are.

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
        str, typer.Option(help="Intended use and users of the model, in your words.")
    ] = "",
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="A new markdown file. By default the card is printed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model card in markdown: the task, intended use, price for each silo's records,
    quality, and what is not protected.

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
        written_to = None
        if out_file:
            written_to = str(out_file)
        dump({"privacy": facts(found), "out": written_to, "card": text})
    elif out_file:
        say(f"Wrote {out_file}.")
    else:
        put(text)
