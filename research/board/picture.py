"""Draw docs/figures/hospitals.svg: what each method has learned on each table."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib import rc_context

from research.board.comparisons import Level, Trials
from research.board.page import PERSONAL, gain
from research.figures import OKABE_ITO

EPSILON = 3.0
LEAST, MOST = -150, 200
"""The ends of the axis; a point beyond them is drawn at the end."""
METHODS = {
    PERSONAL: ("personal models (silodp)", "blue", "o"),
    "silodp": ("released model (silodp)", "sky", "s"),
    "MR-MTL": ("MR-MTL", "orange", "^"),
    "alone": ("alone, without privacy", "green", "D"),
}


def draw(trials: Trials, path: Path) -> None:
    """Write the picture, with the same bytes for the same trials."""
    level = Level.of(trials, EPSILON)
    tables = list(level.losses)
    figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(tables) + 1.4), layout="constrained")
    rows = range(len(tables), 0, -1)
    axes.axvline(0, color="gray", linewidth=1)
    axes.axvline(100, color="gray", linewidth=1, linestyle="--")
    for name, (label, color, marker) in METHODS.items():
        found = [gain(level.losses[table], name) for table in tables]
        shown = [min(max(one, LEAST), MOST) for one in found if one is not None]
        axes.scatter(
            shown, list(rows), label=label, color=OKABE_ITO[color], marker=marker, s=36, zorder=2
        )
    axes.set_yticks(list(rows), tables)
    axes.set_xlim(LEAST - 10, MOST + 10)
    axes.set_xticks(
        [-150, -100, 0, 100, 200], ["-150 or less", "-100", "0: the mean", "100: pooled", "200"]
    )
    axes.set_xlabel("per cent of what can be learned from all rows in one place")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.08), ncols=4, frameon=False, fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right", "left"]].set_visible(False)
    with rc_context({"svg.hashsalt": "silodp", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
