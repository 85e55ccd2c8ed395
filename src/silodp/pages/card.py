"""`silodp export card`: a model card in markdown, with a privacy block that a data officer can
copy. Everything in it is in the run's folder already.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from silodp.core import quality
from silodp.core.figures import NO_MU, WHY, shown
from silodp.core.privacy.accounting import Budget, gdp_mu, rounded_up
from silodp.core.problem.schema import Schema
from silodp.host.model import about_of
from silodp.pages.judged import grouped, refused
from silodp.pages.runs import Run, Silo, check_trained
from silodp.pages.unprotected import sentences
from silodp.runs import RunFolder

UNTOLD = (
    "Not stated. Whoever hands the model on must say for whom it is, who was in the data, and "
    "for what it was never tested."
)
TUNED = {
    True: (
        "a tuning on the silos' own records chose the settings, and its price is in its own "
        "folder (tune.json); it is not in the figures above"
    ),
    False: (
        "the run's folder records none; if settings were chosen by looking at other runs on "
        "these records, their price is not in the figures above"
    ),
}


def card(run: Run, use: str = "") -> str:
    """The card of a finished run."""
    check_trained(run, "a model card")
    parts = [
        f"# Model card: {run.folder.resolve().name}",
        _what(run, about_of(run.folder)),
        f"## Intended use\n{use.strip() or UNTOLD}",
        _privacy(run),
        _scores(run),
        "## What is not protected, and what to know\n"
        + "\n".join(f"- {sentence}" for sentence in sentences(run)),
    ]
    return "\n\n".join(parts) + "\n"


def facts(run: Run) -> dict[str, Any]:
    """The privacy block, for machines."""
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
                "mu": _mu(s),
                "training_epsilon": s.spent,
            }
            for s in run.silos
        ],
        "tuning_charged": False if not _tuned(run) else None,
        "simulated": run.kind == "train",
    }


def _what(run: Run, about: dict[str, str]) -> str:
    if "schema" in about:
        schema = Schema.parse(about["schema"], "the model")
    else:
        schema = None
    plain = json.loads(about.get("plain", "{}"))
    if schema:
        columns = [column.name for column in schema.columns]
    else:
        columns = plain.get("features", [])
    if schema:
        classes = schema.label.classes
    else:
        classes = plain.get("classes", [])
    if schema:
        label = f"{schema.label.name} ({schema.label.task})"
    else:
        label = str(plain.get("label", ""))
    rows = {
        "model": f"{about.get('model')}, {run.about.get('parameters')} parameters",
        "predicts": label + (f": {', '.join(classes)}" if classes else ""),
        "from": f"{', '.join(columns[:12])}{f' and {len(columns) - 12} more' if len(columns) > 12 else ''}"  # noqa: E501
        if columns
        else "images",
        "learnt by": f"{run.algorithm}, {run.total} rounds, over {len(run.silos)} silos"
        + (", in simulation" if run.kind == "train" else ""),
        "file": f"model.safetensors, SHA-256 {about['sha256']}",
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _privacy(run: Run) -> str:
    whom = {
        "masks": (
            "the server, which sees totals, and silos that collude with it, as many as the "
            "order says"
        ),
        "shuffle": "the server, which sees totals",
        "central": "whoever sees the model; the server sees every record",
    }
    lines = [
        "## Privacy",
        f"- unit: {_unit(run)}; neighbours replace one record, and the number of records is public",
        (
            "- against: "
            f"{whom.get(str(run.about.get('trust')), 'everybody who sees what a silo sends, the server and the other silos too')}"  # noqa: E501
        ),
        (
            f"- accounting: rule {run.rule}; figures are of "
            f"training{' and evaluations together' if any(s.evaluated for s in run.silos) else ''}, "  # noqa: E501
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            ""
            f"rounded up{run.provided}"
        ),
        f"- tuning: {TUNED[_tuned(run)]}",
        "",
        "| silo | records | epsilon | delta | mu | of which training |",
        "|---|---|---|---|---|---|",
    ]
    for s in run.silos:
        mu = _mu(s)
        lines.append(
            f"| {s.name} | {s.records} | {shown(s.together[0])} | "
            f"{rounded_up(s.together[1])} | {'-' if mu is None else shown(mu)} | "
            f"{shown(s.spent)} |"
        )
    return "\n".join(
        [*lines, *(["", f"mu: {NO_MU}."] if any(_mu(s) is None for s in run.silos) else [])]
    )


def _scores(run: Run) -> str:
    if not run.scored:
        none = "None: nobody has asked held-out records how good the model is (`silodp evaluate`)."
        return _explained(
            ["## Evaluation", refused(run) if run.evaluations else none, *_groups(run)]
        )
    scores = run.scored[-1]["scores"]
    whole = scores[0]
    lines = [
        "## Evaluation",
        (
            f"On {whole['held_out']} held-out records, by private releases; the last one. "
            f"{quality.verdict(whole)}"
        ).rstrip(),
        *_table(
            ("figure", "value", "95 %"),
            [(name, *quality.cells(whole, name)[:2]) for name in whole["figures"]],
        ),
        *_table(("predicted risk", "observed share", "95 %", "records"), quality.reliable(whole)),
        *(_table(*quality.by_silo(scores)) if len(scores) > 2 else ()),
        *_groups(run),
        "",
        "95 %: by the privacy noise and by the number of records together.",
    ]
    return _explained(lines)


def _explained(lines: Sequence[str]) -> str:
    return "\n".join([*lines, *(["", WHY] if any("too noisy" in line for line in lines) else [])])


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
    if rows:
        lines = [columns, ["---"] * len(columns), *rows]
    else:
        lines = []
    if rows:
        return ["", *(f"| {' | '.join(map(_cell, line))} |" for line in lines)]
    return []


def _cell(value: object) -> str:
    """A schema's names may hold what ends a cell or a line."""
    return " ".join(str(value).replace("|", "/").split())


def _unit(run: Run) -> str:
    if run.of_persons:
        what = "one person, with all of its rows"
    else:
        what = "one record, a row of a silo's file"
    if not run.about.get("user_level"):
        return what
    return "one record; budgets were given for a whole silo"


def _mu(s: Silo) -> float | None:
    if s.gaussian:
        return gdp_mu(Budget(*s.together))
    return None


def _tuned(run: Run) -> bool:
    return any(
        RunFolder(place).tuning.exists()
        for place in (run.folder, Path(run.folder).resolve().parent)
    )
