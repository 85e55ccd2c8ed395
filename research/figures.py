"""Figures from result rows. PNG for a README, SVG for paper."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from research.study import CURVES
from silodp.host import atomic

matplotlib.rcParams["svg.hashsalt"] = "silodp"  # the same figure is the same file

OKABE_ITO = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "sky": "#56B4E9",
    "pink": "#CC79A7",
    "black": "#000000",
}
"""Colours that are told apart by whoever sees colours otherwise."""
METHODS = {
    "mb-sgd": ("MB-SGD", "red", "s"),
    "spider": ("SPIDER", "blue", "o"),
    "spider-diff": ("SPIDER, phase > 1", "sky", "D"),
    "local-sgd": ("Local SGD", "green", "^"),
}
TRUSTS = {
    "": ("ISRL-DP", "blue", "o"),
    "-shuffle": ("masks or shuffle", "orange", "s"),
    "-masks": ("masks, 2 may collude", "pink", "v"),
    "-central": ("central DP", "green", "^"),
}
SPARE = ("pink", "orange", "black")
ALONE = {"linear": ("logistic regression", "black", "v")}
"""What studies of its own draw."""


def draw_comparison(rows: Sequence[dict], stem: Path, *, title: str) -> None:
    """PNG and SVG of that stem: test error against epsilon, with standard errors, at most five
    curves a panel, each with its name at its end.
    """
    shown = [
        (name, curves)
        for name, curves in _panels([*dict.fromkeys(r["curve"] for r in rows)])
        if curves
    ]
    figure, axes = plt.subplots(
        1,
        len(shown),
        figsize=(1.2 + 4.9 * len(shown), 4.6),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    named: list[tuple] = []
    for ax, (name, curves) in zip(axes[0], shown, strict=True):
        ends: list[tuple[float, str, str]] = []
        for curve, (label, color, marker) in curves.items():
            mine = [r for r in rows if r["curve"] == curve and r["epsilon"] is not None]
            if not mine:
                continue
            x, y, bars = ([r[k] for r in mine] for k in ("epsilon", "test_error", "standard_error"))
            ax.errorbar(
                x,
                y,
                yerr=bars,
                color=OKABE_ITO[color],
                marker=marker,
                markersize=4,
                linewidth=1.4,
                capsize=2,
            )
            ends.append((y[-1], label, OKABE_ITO[color]))
            ax.set_xscale("log")
            ax.set_xticks(x, [f"{e:g}" for e in x])
            ax.minorticks_off()
        for r in [r for r in rows if r["curve"] == "mb-sgd-open" and "mb-sgd" in curves]:
            ax.axhline(r["test_error"], color="#777777", linewidth=0.8, linestyle="--")
            ends.append((r["test_error"], "MB-SGD, not private", "#777777"))
        ax.set(xlabel="epsilon of every record (delta = 1/n²)", title=name)
        ax.grid(alpha=0.25)
        named.append((ax, ends))
    for ax, ends in named:  # once all panels have said how high the axis goes
        _name_ends(ax, ends)
    axes[0][0].set_ylabel("test error")
    figure.suptitle(title, fontsize=11)
    _save(figure, stem)


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], stem: Path
) -> None:
    """PNG of that stem: a panel for each name, in it a line for each label, through points of
    epsilon and test error.
    """
    wide = min(3, len(panels))
    figure, axes = plt.subplots(
        -(-len(panels) // wide),
        wide,
        figsize=(5.4 * wide, 3.6 * -(-len(panels) // wide)),
        layout="constrained",
        squeeze=False,
    )
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    for ax, (name, lines) in zip(axes.flat, panels.items(), strict=False):
        ends = []
        for (label, points), color, marker in zip(
            lines.items(), ("red", "sky", "blue", "green", "orange"), "soD^v", strict=False
        ):
            if points:
                x, y = zip(*points, strict=True)
                ax.plot(x, y, color=OKABE_ITO[color], marker=marker, markersize=4, linewidth=1.4)
                ax.set_xscale("log")
                ax.set_xticks(x, [f"{e:g}" for e in x], fontsize=8)
                ax.minorticks_off()
                ends.append((y[-1], label, OKABE_ITO[color]))
        ax.set(title=name, xlabel="epsilon", ylabel="test error")
        ax.grid(alpha=0.25)
        _name_ends(ax, ends)
    _save(figure, stem, (".png",))


def _panels(curves: Sequence[str]) -> list[tuple[str, dict[str, tuple[str, str, str]]]]:
    """What is drawn beside what: methods by their noise, or trusts by method; whatever else is
    there gets colours that are left.
    """
    if any(curve.endswith(("-shuffle", "-masks")) for curve in curves):
        methods = (
            ("MB-SGD", "mb-sgd", "mb-sgd"),
            ("SPIDER, phase > 1", "spider-diff", "spider"),
            ("logistic regression, momentum", "momentum", "momentum"),
        )
        panels = []
        for name, plain, base in methods:
            under = {f"{base}{t}" if t else plain: how for t, how in TRUSTS.items()}
            panels.append((name, {curve: how for curve, how in under.items() if curve in curves}))
        return panels
    own = [curve for curve in curves if curve not in CURVES]
    more = {
        curve: (curve.rpartition(":")[2], color, "v")
        for curve, color in zip(own, SPARE, strict=False)
    }
    exact = {curve: how for curve, how in (METHODS | ALONE).items() if curve in curves} | dict(
        [*more.items()][: 5 - len(METHODS)]
    )
    later = dict([*more.items()][5 - len(METHODS) :])
    paper = {f"{curve}-paper": how for curve, how in METHODS.items() if f"{curve}-paper" in curves}
    return [("exact accounting", exact), ("the paper's constants", paper), ("others", later)]


def _name_ends(ax, ends: Sequence[tuple[float, str, str]]) -> None:
    """Each curve's name behind its last point, moved apart where two would lie on each other."""
    low, high = ax.get_ylim()
    if ax.get_yscale() == "log":
        scale = log
        back = exp
    else:
        scale = float
        back = float
    least = (scale(high) - scale(low)) * 0.055
    last = -float("inf")
    for y, label, color in sorted(ends):
        last = max(scale(y), last + least)
        ax.annotate(
            label,
            (1.01, back(last)),
            xycoords=("axes fraction", "data"),
            color=color,
            fontsize=8,
            va="center",
            annotation_clip=False,
        )


RATES: dict[str, tuple[str, dict[tuple[str, str], tuple[str, str]]]] = {
    "ISRL-DP, least squares": (
        "risk",
        {
            ("prox-sgd", "isrl"): ("red", "Prox-SGD"),
            ("prox-svrg", "isrl"): ("sky", "Prox-SVRG"),
            ("prox-pl-svrg", "isrl"): ("blue", "Prox-PL-SVRG"),
            ("accelerated", "isrl"): ("green", "accelerated"),
        },
    ),
    "ISRL-DP beside SDP, least squares": (
        "risk",
        {
            ("prox-sgd", "isrl"): ("red", "Prox-SGD"),
            ("prox-sgd", "sdp"): ("orange", "SDP Prox-SGD"),
        },
    ),
    "ISRL-DP beside SDP, Welsch's loss": (
        "mapping",
        {
            ("spider", "isrl"): ("green", "SPIDER"),
            ("spider-alternate", "isrl"): ("blue", "alternate"),
            ("spider", "sdp"): ("orange", "SDP SPIDER"),
        },
    ),
    "ISRL-DP, linear losses": ("convex", {("localized", "isrl"): ("pink", "localized")}),
}
"""Rows of the figure of rates: what is measured, and which algorithms under which trust, at most
five curves a panel.
"""


def draw_rates(
    fits: Sequence[dict], folder: Path, *, suffixes: Sequence[str] = (".png", ".svg")
) -> None:
    """rates.png and rates.svg: what the theorems bound against epsilon, n, N and d, with fits, SDP
    beside ISRL-DP; and regime.png and regime.svg.

    A lower bound, with constant 1, is drawn at the sizes where its conditions hold, and nowhere
    else; nor where a measured point is below it, which says that its constant is less.
    """
    ylabels = {"risk": "excess risk", "mapping": "E ‖gradient mapping‖²", "convex": "excess risk"}
    figure, axes = plt.subplots(
        len(RATES), 4, figsize=(17, 3.1 * len(RATES)), layout="constrained", sharey="row"
    )
    for (title, (measure, curves)), line in zip(RATES.items(), axes, strict=True):
        named = []
        for against, ax in zip(("epsilon", "n", "N", "d"), line, strict=True):
            mine = [
                f
                for f in fits
                if (f["measure"], f["against"]) == (measure, against)
                and (f["algorithm"], f["trust"]) in curves
            ]
            named.append(
                (ax, [_draw_fit(ax, f, *curves[f["algorithm"], f["trust"]]) for f in mine])
            )
            ticks = sorted({v for f in mine for v in f["x"]})
            ticks = ticks[:: max(1, -(-len(ticks) // 5))]
            ax.set(xscale="log", yscale="log", xlabel=against)
            ax.set_xticks(ticks, [f"{v:g}" for v in ticks], fontsize=8)
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.grid(alpha=0.25)
        for ax, ends in named:
            _name_ends(ax, ends)
        line[0].set(ylabel=ylabels[measure], title=title)
    if any(p["lower_bound"] is not None for f in fits for p in f["points"]):
        bound = ", dotted lower bound where its conditions hold"
    else:
        bound = ""
    figure.suptitle(
        f"Fitted slope (theory's): solid fit, dashed theory{bound}, open marks sampling term",
        fontsize=10,
    )
    _save(figure, folder / "rates", suffixes)
    _draw_regime(fits, folder / "regime", suffixes)


def _draw_fit(ax, fit: dict, color: str, name: str) -> tuple[float, str, str]:
    """Points, fit, theory and bound of one line; what its end is called."""
    x = fit["x"]
    y = [p["value"] for p in fit["points"]]
    ink = OKABE_ITO[color]
    if fit["sampling"]:
        face = {"markerfacecolor": "white"}
    else:
        face = {}
    ax.errorbar(
        x,
        y,
        yerr=[p["standard_error"] for p in fit["points"]],
        color=ink,
        marker="o",
        markersize=4,
        linestyle="",
        **face,
    )
    middle, level = (exp(sum(map(log, values)) / len(x)) for values in (x, y))
    ax.plot(x, [level * (v / middle) ** fit["slope"] for v in x], color=ink, linewidth=1.2)
    ax.plot(
        x,
        [level * (v / middle) ** fit["theory"] for v in x],
        color=ink,
        linewidth=0.9,
        linestyle="--",
    )
    known = [
        (v, p["lower_bound"])
        for v, p in zip(x, fit["points"], strict=True)
        if p["lower_bound"] is not None
    ]
    if known and all(
        p["lower_bound"] is None or p["lower_bound"] <= p["value"] for p in fit["points"]
    ):
        ax.plot(*zip(*known, strict=True), color=ink, linewidth=0.9, linestyle=":", marker="_")
    return y[-1], f"{name} {fit['slope']:+.2f} ({fit['theory']:+.2f})", ink


def _draw_regime(fits: Sequence[dict], stem: Path, suffixes: Sequence[str]) -> None:
    """SPIDER's 4/3: far from the minimum with short phases, and near it with long ones; beside it
    the share of an anchor's noise that they carry.
    """
    mine = [
        f
        for f in fits
        if (f["algorithm"], f["trust"], f["against"]) == ("spider", "isrl", "epsilon")
    ]
    if not mine:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    looks = {"mapping": ("green", "far start"), "near": ("blue", "near start")}
    ends = [_draw_fit(left, f, *looks[f["measure"]]) for f in mine]
    left.set(
        xscale="log",
        yscale="log",
        xlabel="epsilon",
        ylabel="E ‖gradient mapping‖²",
        title="SPIDER: slope (theory's)",
    )
    shares = []
    for f in mine:
        color, name = looks[f["measure"]]
        right.plot(
            f["x"],
            [p["carried"] for p in f["regime"]],
            color=OKABE_ITO[color],
            marker="o",
            markersize=4,
        )
        for v, p in zip(f["x"], f["regime"], strict=True):
            right.annotate(
                f"q = {p['phase']}",
                (v, p["carried"]),
                xytext=(3, -11),
                textcoords="offset points",
                fontsize=7,
                color=OKABE_ITO[color],
            )
        shares.append((f["regime"][-1]["carried"], name, OKABE_ITO[color]))
    right.set(
        xscale="log",
        xlabel="epsilon",
        ylabel="share of an anchor's noise carried",
        ylim=(0, 1.05),
        title="How much of it phases of q rounds carry (bound: 1)",
    )
    for ax in (left, right):
        ticks = sorted({v for f in mine for v in f["x"]})
        ax.set_xticks(ticks, [f"{v:g}" for v in ticks], fontsize=8)
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.25)
    _name_ends(left, ends)
    _name_ends(right, shares)
    _save(figure, stem, suffixes)


def _save(figure, stem: Path, suffixes: Sequence[str] = (".png", ".svg")) -> None:
    for suffix in suffixes:
        drawn = io.BytesIO()
        figure.savefig(
            drawn, format=suffix[1:], dpi=150, metadata={"Date": None} if suffix == ".svg" else None
        )
        atomic.write(stem.with_suffix(suffix), drawn.getvalue(), mode=0o644, durable=False)
    plt.close(figure)
