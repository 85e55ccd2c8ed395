"""Write the tables of docs/hospitals.md and docs/choosing.md from the trials.

Prose is written by hand. Each table is between two comments, `<!-- board NAME -->` and
`<!-- end of board -->`, and is written again by `python -m research board --pages docs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from research.board.comparisons import Level, Ranking, Trials, cell, complete
from research.board.scores import SIZES
from research.board.tables import TABLES
from research.board.trials import EPSILONS, FILE, task_of
from silodp.core.errors import BadInput
from silodp.host import atomic

PERSONAL = "silodp personal"
OURS = ("silodp", PERSONAL)
GROUPS = {
    "to_100": "up to 100",
    "to_500": "101 to 500",
    "to_2000": "501 to 2,000",
    "above": "more",
}
KINDS = {
    "binary": "log loss",
    "count": "deviance",
    "number": "squared error",
    "survival": "log loss",
}
RANKS = {"binary": "AUC", "count": "D2", "number": "R2", "survival": "c"}
LATER = ("silodp masks",)
"""Contestants that may have fewer seeds than the others."""
FIGURES = ("pooled", "alone", *OURS)
BLOCK = re.compile(r"<!-- board ([a-z0-9 -]+) -->\n.*?<!-- end of board -->", re.DOTALL)


def read_trials(path: Path) -> Trials:
    """Return the complete trials in a file, or in the folder of a run."""
    if path.is_dir():
        path = path / FILE
    if not path.exists():
        raise BadInput(f"{path} does not exist; run `python -m research board` first")
    return complete(pd.read_csv(path))


def write_pages(trials: Trials, pages: Sequence[Path]) -> list[Path]:
    """Write every block of these pages again, and return the pages that have one."""
    changed = []
    for page in pages:
        old = page.read_text(encoding="utf-8")
        if not BLOCK.search(old):
            continue
        new = BLOCK.sub(lambda match: block(match[1], trials), old)
        atomic.write(page, new, mode=0o644)
        changed.append(page)
    return changed


def block(name: str, trials: Trials) -> str:
    """Return a block with its two comments. Raise BadInput for an unknown name."""
    kind, _, argument = name.partition(" ")
    if kind not in BLOCKS:
        raise BadInput(f"the block {name!r} is unknown; use one of {', '.join(BLOCKS)}")
    return f"<!-- board {name} -->\n{BLOCKS[kind](trials, argument)}\n<!-- end of board -->"


# --- blocks --------------------------------------------------------------------------------------


def wins(trials: Trials, argument: str) -> str:
    """Return on how many tables each private contestant of trust isrl is first, or within noise of
    first. "released" leaves out the personal models, which stay in their silos.
    """
    rankings = []
    for epsilon in sorted(EPSILONS):
        level = Level.of(trials, epsilon)
        names = level.of_trust("isrl")
        if argument == "released":
            names = [name for name in names if name != PERSONAL]
        if names:
            rankings.append(Ranking(level, names))
    rows = []
    if argument != "released":
        rows.append([" or ".join(OURS), *(_places(ranking, OURS) for ranking in rankings)])
    for name in dict.fromkeys(name for ranking in rankings for name in ranking.contestants):
        rows.append([name, *(_places(ranking, (name,)) for ranking in rankings)])
    head = ["method", *(f"epsilon {r.level.epsilon:g} ({len(r.tables)} tables)" for r in rankings)]
    return markdown(head, rows)


def _places(ranking: Ranking, names: Sequence[str]) -> str:
    first = sum(ranking.first(table) in names for table in ranking.tables)
    near = sum(bool(set(names) & set(ranking.within_noise(table))) for table in ranking.tables)
    return f"{first} ({near})"


def cost(trials: Trials, argument: str) -> str:
    """Return for each method the median over the tables of how much of the pooled model's gain it
    has, and on how many tables it is worse than the mean.
    """
    levels = [Level.of(trials, epsilon) for epsilon in sorted(EPSILONS)]
    levels = [level for level in levels if level.of_trust("isrl")]
    names = dict.fromkeys(name for level in levels for name in level.of_trust("isrl", "masks"))
    rows = []
    for name in ("alone", *names):
        cells = [name]
        for level in levels:
            gains = [gain(wide, name) for wide in level.losses.values()]
            known = [one for one in gains if one is not None]
            if not any(map(math.isfinite, known)):
                cells.append("")
                continue
            below = sum(one < 0 for one in known)
            cells.append(
                f"{_percent(float(np.median(known)))} (below 0 on {below} of {len(known)})"
            )
        rows.append(cells)
    return markdown(["method", *(f"epsilon {level.epsilon:g}" for level in levels)], rows)


def learned(trials: Trials, argument: str) -> str:
    """Return for one epsilon how much of the pooled model's gain each contestant has."""
    level = Level.of(trials, float(argument))
    ranking = Ranking(level, level.of_trust("isrl"))
    names = ["alone", *ranking.contestants, *level.of_trust("masks", "central")]
    rows = []
    for table in ranking.tables:
        first = ranking.first(table)
        near = ranking.within_noise(table)
        cells = [f"{table} ({len(level.losses[table])})"]
        for name in names:
            learnt = gain(level.losses[table], name)
            text = _percent(learnt)
            if name == first:
                text = f"**{text}**"
            elif name in ranking.contestants and name not in near and math.isfinite(learnt or 0.0):
                text += "†" if text else ""
            cells.append(text)
        rows.append(cells)
    return markdown(["table (seeds)", *names], rows)


def gain(wide: Trials, name: str) -> float | None:
    """Return the gain over the mean, in per cent of the pooled model's gain: minus infinity where
    the contestant refused, and None where it did not run.
    """
    if name not in wide:
        return None
    if wide[name].isna().any() and name not in LATER:
        return -math.inf
    rows = wide[wide[name].notna()]
    constant = rows["constant"].mean()
    return 100 * float((constant - rows[name].mean()) / (constant - rows["pooled"].mean()))


def _percent(part: float | None) -> str:
    if part is None:
        return ""
    if math.isinf(part):
        return "refused"
    return f"{part:.0f}" if part > -1000 else "below -1000"


def figures(trials: Trials, argument: str) -> str:
    """Return loss, ranking, slope and mean prediction of pooled, alone, together and personal."""
    rows = []
    for table in TABLES:
        for epsilon in (1.0, 3.0, 8.0):
            own = cell(trials, table, epsilon)
            models = [own[own["contestant"] == name] for name in FIGURES]
            if not all(map(len, models)):
                continue
            task = task_of(table)
            observed = mean_value(models[0]["observed"].mean(), task)
            means = " / ".join(mean_value(model["mean"].mean(), task) for model in models)
            rows.append(
                [
                    f"{table} ({KINDS[task]}, {RANKS[task]})",
                    f"{epsilon:g}",
                    str(own["seed"].nunique()),
                    " / ".join(loss_text(model["loss"].mean()) for model in models),
                    " / ".join(f"{model['rank'].mean():.3f}" for model in models),
                    " / ".join(f"{model['slope'].median():.2f}" for model in models),
                    f"{means} ({observed})",
                ]
            )
    head = ["table", "epsilon", "seeds", "loss", "ranking", "slope", "mean (observed)"]
    return markdown(head, rows)


def joining(trials: Trials, argument: str) -> str:
    """Return for silos of each size how the personal and the shared model compare with alone."""
    rows = []
    for group in SIZES:
        for epsilon in sorted(EPSILONS):
            level = Level.of(trials, epsilon, f"loss_{group}")
            ratios: dict[str, list[float]] = {name: [] for name in OURS}
            for wide in level.losses.values():
                alone = float(wide["alone"].mean())
                if math.isnan(alone):
                    continue
                for name in OURS:
                    ratios[name].append(float(wide[name].mean()) / alone - 1)
            if not ratios[PERSONAL]:
                continue
            cells = [GROUPS[group], f"{epsilon:g}", str(len(ratios[PERSONAL]))]
            for name in reversed(OURS):
                lower = sum(ratio < 0 for ratio in ratios[name])
                cells.append(f"{100 * float(np.median(ratios[name])):+.1f} % (lower on {lower})")
            rows.append(cells)
    head = ["training rows", "epsilon", "tables", "personal", "shared"]
    return markdown(head, rows)


def beaten(trials: Trials, argument: str) -> str:
    """Return the tables on which one of silodp's two models (the argument names it, or the better
    one) is significantly worse than another contestant of trust isrl.
    """
    models = (argument,) if argument else OURS
    rows = []
    for epsilon in sorted(EPSILONS):
        level = Level.of(trials, epsilon)
        ranking = Ranking(level, level.of_trust("isrl"))
        for table in ranking.tables:
            means = ranking.means(table)
            ours = min(models, key=lambda name: means[name])
            better = [
                f"{name} {loss_text(means[name])}"
                for name in means
                if name not in OURS and ranking.worse(ours, name, table)
            ]
            if better:
                mine = f"{ours} {loss_text(means[ours])}"
                rows.append([table, f"{epsilon:g}", mine, ", ".join(better)])
    if not rows:
        return "There is none."
    return markdown(["table", "epsilon", "silodp's loss", "better"], rows)


def one_table(trials: Trials, argument: str) -> str:
    """Return loss and ranking of every contestant on a table at an epsilon: "school 6"."""
    table, _, epsilon = argument.partition(" ")
    own = cell(trials, table, float(epsilon))
    task = task_of(table)
    found = []
    for name, rows in own.groupby("contestant", sort=False):
        found.append((float(rows["loss"].mean()), str(name), rows))
    lines = [
        [name, rows["trust"].iloc[0], f"{loss:.5f}", f"{rows['rank'].mean():.3f}"]
        for loss, name, rows in sorted(found, key=lambda one: one[0])
    ]
    return markdown(["method", "trust", KINDS[task], RANKS[task]], lines)


def sizes(trials: Trials, argument: str) -> str:
    """Return what each table is, and how many seeds are complete at each epsilon."""
    rows = []
    for table in TABLES:
        one = TABLES[table]
        seeds = [
            str(cell(trials, table, epsilon)["seed"].nunique()) for epsilon in sorted(EPSILONS)
        ]
        about = [table, one.title, task_of(table), one.silos, one.source, one.licence]
        rows.append([*about, " / ".join(seeds)])
    at = " / ".join(f"{epsilon:g}" for epsilon in sorted(EPSILONS))
    head = ["table", "what it is", "task", "silo", "source", "licence", f"seeds at epsilon {at}"]
    return markdown(head, rows)


BLOCKS: dict[str, Callable[[pd.DataFrame, str], str]] = {
    "wins": wins,
    "cost": cost,
    "learned": learned,
    "figures": figures,
    "joining": joining,
    "beaten": beaten,
    "sizes": sizes,
    "table": one_table,
}


# --- shared --------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def loss_text(value: float) -> str:
    """Return a loss with three figures or more."""
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}"


def mean_value(value: float, task: str) -> str:
    """Return a mean prediction: risks in per cent, counts and numbers as they are."""
    if task in ("binary", "survival"):
        return f"{100 * value:.1f} %"
    return f"{value:.3f}"
