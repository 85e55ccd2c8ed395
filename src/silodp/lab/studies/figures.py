"""Figures from result rows. PNG for a README, SVG for paper."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import exp, log
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from silodp.host import atomic
from silodp.lab.studies.study import CURVES

matplotlib.rcParams["svg.hashsalt"] = "silodp"  # the same figure is the same file

STYLE = {
    "spider": ("#0b5fa5", "-", "o"), "spider-diff": ("#7fb2dd", "-", "D"), "mb-sgd": ("#d1495b", "-", "s"), "local-sgd": ("#2e8b57", "-", "^"),
    "spider-paper": ("#0b5fa5", ":", "o"), "spider-diff-paper": ("#7fb2dd", ":", "D"), "mb-sgd-paper": ("#d1495b", ":", "s"),
    "local-sgd-paper": ("#2e8b57", ":", "^"), "spider-open": ("#0b5fa5", "--", ""), "mb-sgd-open": ("#d1495b", "--", ""),
    "local-sgd-open": ("#2e8b57", "--", ""), "mb-sgd-shuffle": ("#d1495b", "--", "s"), "spider-shuffle": ("#7fb2dd", "--", "D"),
    "mb-sgd-masks": ("#d1495b", "-.", "^"), "spider-masks": ("#7fb2dd", "-.", "^"),
    "mb-sgd-central": ("#d1495b", ":", "x"), "spider-central": ("#7fb2dd", ":", "x"),
}  # fmt: skip


def draw_comparison(rows: Sequence[dict], stem: Path, *, title: str) -> None:
    """PNG and SVG of that stem: test error against epsilon, one curve for each algorithm and noise, with standard errors."""
    figure, axes = plt.subplots(figsize=(7.2, 5.8), layout="constrained")
    own = [curve for curve in dict.fromkeys(r["curve"] for r in rows) if curve not in CURVES]
    for curve, (color, line, marker) in (STYLE | {curve: (f"C{4 + i}", "-", "v") for i, curve in enumerate(own)}).items():
        mine = [r for r in rows if r["curve"] == curve]
        if curve.endswith("-open"):
            for r in mine:
                axes.axhline(r["test_error"], color=color, linestyle=line, linewidth=1, label=CURVES.get(curve, curve))
        elif mine:
            epsilons = [r["epsilon"] for r in mine]
            axes.errorbar(
                epsilons, [r["test_error"] for r in mine], yerr=[r["standard_error"] for r in mine], color=color, linestyle=line,
                marker=marker, markersize=4, linewidth=1.4, capsize=2, label=CURVES.get(curve, curve),
            )  # fmt: skip
            axes.set_xscale("log")
            axes.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
            axes.minorticks_off()
    axes.set(xlabel="epsilon of every record (delta = 1/n²)", ylabel="test error", title=title)
    axes.grid(alpha=0.25)
    figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    _save(figure, stem)


def draw_rates(fits: Sequence[dict], folder: Path, *, suffixes: Sequence[str] = (".png", ".svg")) -> None:
    """rates.png and rates.svg: excess risk above, squared mapping norm below, against epsilon, n, N and d, with fits.

    A lower bound is drawn at the sizes where its conditions hold, and nowhere else.
    """
    colors = {"prox-sgd": "#d1495b", "prox-svrg": "#7fb2dd", "prox-pl-svrg": "#0b5fa5", "spider": "#2e8b57", "spider-alternate": "#e8a33d"}
    rows = {"risk": "excess risk", "mapping": "E ‖gradient mapping‖²"}
    figure, axes = plt.subplots(2, 4, figsize=(13.5, 6.6), layout="constrained", sharey="row")
    for (measure, label), line in zip(rows.items(), axes, strict=True):
        for against, ax in zip(("epsilon", "n", "N", "d"), line, strict=True):
            for fit in [f for f in fits if f["measure"] == measure and f["against"] == against]:
                x, y = fit["x"], [p["value"] for p in fit["points"]]
                color, open_face = colors[fit["algorithm"]], {"markerfacecolor": "white"} if fit["sampling"] else {}
                ax.errorbar(
                    x, y, yerr=[p["standard_error"] for p in fit["points"]], color=color, marker="o", markersize=4, linestyle="", **open_face
                )  # fmt: skip
                middle, level = (exp(sum(map(log, values)) / len(x)) for values in (x, y))
                name = f"{fit['algorithm']}{' (sampling term)' if fit['sampling'] else ''}"
                label_of = f"{name} {fit['slope']:+.2f} ± {fit['slope_error']:.2f} ({fit['theory']:+.2f})"
                ax.plot(x, [level * (v / middle) ** fit["slope"] for v in x], color=color, linewidth=1.2, label=label_of)
                ax.plot(x, [level * (v / middle) ** fit["theory"] for v in x], color=color, linewidth=0.9, linestyle="--")
                known = [(v, p["lower_bound"]) for v, p in zip(x, fit["points"], strict=True) if p["lower_bound"] is not None]
                if known:
                    ax.plot(*zip(*known, strict=True), color=color, linewidth=0.9, linestyle=":", marker="_", label="its lower bound")
            ax.set(xscale="log", yscale="log", xlabel=against)
            ticks = sorted({v for f in fits if f["measure"] == measure and f["against"] == against for v in f["x"]})
            ax.set_xticks(ticks[:: max(1, len(ticks) // 5)], [f"{v:g}" for v in ticks[:: max(1, len(ticks) // 5)]], fontsize=8)
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.grid(alpha=0.25)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=6.5, loc="lower left" if against != "d" else "lower right")
        line[0].set_ylabel(label)
    figure.suptitle("Fitted slope ± standard error (theory): solid fit, dashed theory", fontsize=10)
    _save(figure, folder / "rates", suffixes)


def _save(figure, stem: Path, suffixes: Sequence[str] = (".png", ".svg")) -> None:
    for suffix in suffixes:
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix[1:], dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
        atomic.write(stem.with_suffix(suffix), drawn.getvalue(), mode=0o644, durable=False)
    plt.close(figure)
