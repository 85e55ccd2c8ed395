"""`silodp report` and `silodp ui`: pages about runs and, at a silo, about its gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from silodp.core.errors import BadInput


def report(
    run: Annotated[Path, typer.Argument(help="Folder of `silodp train`, `compare`, `reproduce` or `federation run`.", show_default=False)],
    out_file: Annotated[Path | None, typer.Option("--out", help="The page; report.html in the run's folder by default.")] = None,
    audit: Annotated[
        Path | None, typer.Option(help="Folder, or JSON output, of `silodp audit`; audit.json in the run's folder by default.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write the curves for TensorBoard into this folder.")] = None,
    mlflow: Annotated[Path | None, typer.Option(help="Also write settings and curves as an MLflow run into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")] = False,
) -> None:
    """One page that stands alone, to read, print and sign: what was trained, what it cost, what was not protected.

    Examples: `silodp report runs/train` · `silodp report runs/compare-wbcd-R25 --audit runs/audit`
    """
    from silodp.pages import export, runs
    from silodp.pages.report import report as written

    found = runs.read(run)
    rows = runs.audits(audit) if audit else runs.audits(run) if (run / "audit.json").exists() else []
    if tensorboard:
        export.to_tensorboard(found, tensorboard)
    if mlflow:
        export.to_mlflow(found, mlflow)
    page = out_file or run / "report.html"
    try:
        page.write_text(written(found, rows), "utf-8")
    except OSError as error:
        raise BadInput(f"{page} cannot be written ({error.strerror}); choose another with --out") from None
    print(
        json.dumps({"page": str(page), "run_sha256": runs.fingerprint(run)}) if as_json else f"Wrote {page}: it stands alone, and prints."
    )
