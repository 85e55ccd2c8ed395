"""Figures from result rows. PNG for a README, SVG for paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from silodp.lab.compare import CURVES

STYLE = {
    "spider": ("#0b5fa5", "-", "o"), "spider-diff": ("#7fb2dd", "-", "D"), "mb-sgd": ("#d1495b", "-", "s"), "local-sgd": ("#2e8b57", "-", "^"),
    "spider-paper": ("#0b5fa5", ":", "o"), "mb-sgd-paper": ("#d1495b", ":", "s"), "local-sgd-paper": ("#2e8b57", ":", "^"),
    "mb-sgd-open": ("#d1495b", "--", ""), "local-sgd-open": ("#2e8b57", "--", ""),
}  # fmt: skip


def draw_comparison(rows: Sequence[dict], folder: Path, *, title: str) -> None:
    """figure.png and figure.svg: test error against epsilon, one curve for each algorithm and noise, with standard errors."""
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    for curve, (color, line, marker) in STYLE.items():
        mine = [r for r in rows if r["curve"] == curve]
        if curve.endswith("-open"):
            for r in mine:
                axes.axhline(r["test_error"], color=color, linestyle=line, linewidth=1, label=CURVES[curve])
        elif mine:
            epsilons = [r["epsilon"] for r in mine]
            axes.errorbar(
                epsilons, [r["test_error"] for r in mine], yerr=[r["standard_error"] for r in mine], color=color, linestyle=line,
                marker=marker, markersize=4, linewidth=1.4, capsize=2, label=CURVES[curve],
            )  # fmt: skip
            axes.set_xscale("log")
            axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
            axes.minorticks_off()
    axes.set(xlabel="epsilon of every record (delta = 1/n²)", ylabel="test error", title=title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7.5)
    _save(figure, folder / "figure")


def draw_rates(fits: Sequence[dict], folder: Path) -> None:
    """rates.png and rates.svg: excess risk against 1/mu and against n, with the fitted lines."""
    panels = sorted({f["against"] for f in fits})
    figure, axes = plt.subplots(1, len(panels), figsize=(8.4, 3.8), layout="constrained", squeeze=False)
    for against, ax in zip(panels, axes[0], strict=True):
        for fit, color in zip([f for f in fits if f["against"] == against], ("#0b5fa5", "#d1495b", "#2e8b57"), strict=False):
            ax.errorbar(fit["x"], fit["risk"], yerr=fit["standard_error"], color=color, marker="o", markersize=4, linestyle="")
            line = [fit["risk"][0] * (x / fit["x"][0]) ** fit["slope"] for x in fit["x"]]
            ax.plot(
                fit["x"], line, color=color, linewidth=1, label=f"{fit['algorithm']}: slope {fit['slope']:+.2f} (theory {fit['theory']:+d})"
            )
        ax.set(xscale="log", yscale="log", xlabel=against, ylabel="excess risk")
        ticks = next(f["x"] for f in fits if f["against"] == against)
        ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.25, which="both")
        ax.legend(fontsize=8)
    _save(figure, folder / "rates")


def _save(figure, stem: Path) -> None:
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    plt.close(figure)
