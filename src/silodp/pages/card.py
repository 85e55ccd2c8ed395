"""`silodp export card`: a model card in markdown, with a privacy block that a data officer can
copy. It uses only the files of the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silodp.core import quality
from silodp.core.figures import NO_MU, WHY, rounded_up, shown
from silodp.core.privacy.accounting import Budget, gdp_mu
from silodp.core.problem.schema import Schema
from silodp.host.model import about_of
from silodp.pages.judged import grouped, refused
from silodp.pages.runs import Run, Silo, check_trained
from silodp.pages.unprotected import sentences
from silodp.runs import RunFolder

UNSTATED = (
    "Not stated. Before you pass the model on, state who it is for, who was in the "
    "data, and what it was never tested for."
)
TUNED = {
    True: (
        "a tuning on the silos' own records chose the settings. Its price is in the "
        "tuning's folder (tune.json) and is not in the figures above"
    ),
    False: (
        "the run's folder records none. If settings were chosen from other runs on "
        "these records, the price of those runs is not in the figures above"
    ),
}


def card(run: Run, use: str = "") -> str:
    """Return the model card of a run. Raise BadInput if the run has no finished training."""
    check_trained(run, "a model card")
    parts = [
        f"# Model card: {run.folder.resolve().name}",
        _what(run, about_of(run.folder)),
        f"## Intended use\n{use.strip() or UNSTATED}",
        _privacy(run),
        _scores(run),
        "## What is not protected, and what to know\n"
        + "\n".join(f"- {sentence}" for sentence in sentences(run)),
    ]
    return "\n\n".join(parts) + "\n"


def facts(run: Run) -> dict[str, Any]:
    """Return the privacy block as JSON data."""
    return {
        "unit": _unit(run),
        "neighbours": "replace one; the number of records is public",
        "trust": run.about.get("trust", "isrl"),
        "rule": run.rule,
        "silos": [
            {
                "name": s.name,
                "records": s.records,
                "epsilon": s.together[0],
                "delta": s.together[1],
                "mu": _mu(s) if s.gaussian else None,
                "training_epsilon": s.spent,
            }
            for s in run.silos
        ],
        "tuning_charged": None if _tuned(run) else False,
        "simulated": run.kind == "train",
    }


def _what(run: Run, about: dict[str, str]) -> str:
    if "schema" in about:
        schema = Schema.parse(about["schema"], "the model")
        columns = [column.name for column in schema.columns]
        classes = schema.label.classes
        label = f"{schema.label.name} ({schema.label.task})"
    else:
        plain = json.loads(about.get("plain", "{}"))
        columns = plain.get("features", [])
        classes = plain.get("classes", [])
        label = str(plain.get("label", ""))
    if classes:
        label += f": {', '.join(classes)}"
    features = ", ".join(columns[:12]) or "images"
    if len(columns) > 12:
        features += f" and {len(columns) - 12} more"
    method = f"{run.algorithm}, {run.total} rounds, over {len(run.silos)} silos"
    if run.kind == "train":
        method += ", in simulation"
    rows = {
        "model": f"{about.get('model')}, {run.about.get('parameters')} parameters",
        "predicts": label,
        "from": features,
        "trained by": method,
        "file": f"model.safetensors, SHA-256 {about['sha256']}",
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _privacy(run: Run) -> str:
    whom = {
        "masks": (
            "the server, which sees totals, together with the stated number of colluding silos"
        ),
        "shuffle": "the server, which sees totals",
        "central": "everyone who sees the model; the server sees every record",
    }
    everyone = "everyone who sees what a silo sends, including the server and the other silos"
    observer = whom.get(str(run.about.get("trust")), everyone)
    covers = "training"
    if any(s.evaluated for s in run.silos):
        covers = "training and evaluations together"
    lines = [
        "## Privacy",
        f"- unit: {_unit(run)}; neighbours replace one record, and the number of records is public",
        f"- against: {observer}",
        f"- accounting: rule {run.rule}; figures are of {covers}, rounded up{run.provided}",
        f"- tuning: {TUNED[_tuned(run)]}",
        "",
        "| silo | records | epsilon | delta | mu | of which training |",
        "|---|---|---|---|---|---|",
    ]
    for s in run.silos:
        mu = "-"
        if s.gaussian:
            mu = shown(_mu(s))
        lines.append(
            f"| {s.name} | {s.records} | {shown(s.together[0])} | "
            f"{rounded_up(s.together[1])} | {mu} | {shown(s.spent)} |"
        )
    if not all(s.gaussian for s in run.silos):
        lines += ["", f"{NO_MU.capitalize()}."]
    return "\n".join(lines)


def _scores(run: Run) -> str:
    if not run.scored:
        why = "None. `silodp evaluate` measures the model on held-out records."
        if run.evaluations:
            why = refused(run)
        return _explained(["## Evaluation", why, *_groups(run)])
    scores = run.scored[-1]["scores"]
    whole = scores[0]
    by_silo = []
    if len(scores) > 2:
        by_silo = _table(*quality.by_silo(scores))
    lines = [
        "## Evaluation",
        (
            f"The latest evaluation: {whole['held_out']} held-out records, by private releases. "
            f"{quality.verdict(whole)}"
        ).rstrip(),
        *_table(
            ("figure", "value", "interval"),
            [(name, *quality.cells(whole, name)[:2]) for name in whole["figures"]],
        ),
        *_table(
            ("predicted risk", "observed share", "interval", "records"), quality.reliable(whole)
        ),
        *by_silo,
        *_groups(run),
        "",
        "An interval contains the true value in at least 95 of 100 evaluations, by privacy noise "
        "and sampling together.",
    ]
    return _explained(lines)


def _explained(lines: Sequence[str]) -> str:
    if any("too noisy" in line for line in lines):
        lines = [*lines, "", WHY]
    return "\n".join(lines)


def _groups(run: Run) -> list[str]:
    lines = list[str]()
    for groups in grouped(run):
        lines += [
            "",
            f"By {groups['by']}. {quality.differences(groups)} {groups['note']}".rstrip(),
            *_table(*quality.by_group(groups)),
        ]
    return lines


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return []
    lines = [columns, ["---"] * len(columns), *rows]
    return ["", *(f"| {' | '.join(map(_cell, line))} |" for line in lines)]


def _cell(value: object) -> str:
    """Remove from a value what would end a cell or a line. A schema's names may contain such
    characters.
    """
    return " ".join(str(value).replace("|", "/").split())


def _unit(run: Run) -> str:
    if run.of_persons:
        what = "one person, with all of its rows"
    else:
        what = "one record, a row of a silo's file"
    if not run.about.get("user_level"):
        return what
    return "one record; the budget was set for a whole silo"


def _mu(s: Silo) -> float:
    return gdp_mu(Budget(*s.together))


def _tuned(run: Run) -> bool:
    return any(
        RunFolder(place).tuning.exists()
        for place in (run.folder, Path(run.folder).resolve().parent)
    )
