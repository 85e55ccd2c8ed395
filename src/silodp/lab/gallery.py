"""Pages of results: each figure redrawn from its small table, with a paragraph that says what it shows, and the leaderboard."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from silodp.core.accounting import rounded_up
from silodp.lab import rates
from silodp.lab.compare import NOTE, improvement, read_table
from silodp.lab.figures import draw_comparison, draw_rates
from silodp.lab.study import CURVES, FIGURES, LEADERBOARD, TRUST, VARIANCE, Study
from silodp.silo.datasets import DATASETS

TITLES = {"wbcd": "Wisconsin breast cancer", "mnist": "MNIST, odd or even", "cifar10": "CIFAR-10"}


def write_gallery(docs: Path, tables: Path) -> list[Path]:
    """figures.md, leaderboard.md, variance.md and trust.md in `docs`, from the tables NAME.csv in `tables`, and rates.png from rates.csv in
    `docs`; what has no table is left out."""
    pages = [write(docs, tables) for write in (_figures, _leaderboard, _variance, _trust)]
    if (docs / "rates.csv").exists():
        draw_rates(rates.read(docs / "rates.csv"), docs, suffixes=(".png",))
        pages.append(docs / "rates.png")
    return [page for page in pages if page]


def title_of(study: Study) -> str:
    silos = f"M = {study.cohort}, " if study.cohort else ""
    return f"{TITLES[study.dataset]}, {silos}R = {study.rounds}"


# --- the paper's figures ----------------------------------------------------------------------------------------------------------


def _figures(docs: Path, tables: Path) -> Path | None:
    parts = ["# The paper's figures, with exact accounting\n", f"{NOTE} Error bars are standard errors over the random splits.\n"]
    for rows, name, heading in _drawn(FIGURES, tables):
        parts += [*heading, f"{reading(rows)} {tuned_over(FIGURES[name])} [Table](figures/{name}.csv).\n"]
    return _write(docs / "figures.md", parts)


def _drawn(studies: Mapping[str, Study], tables: Path) -> Iterator[tuple[list[dict], str, list[str]]]:
    """Each study that has a table: its rows, its name, and the head of its section with the figure, drawn anew."""
    for name, study in studies.items():
        if (tables / f"{name}.csv").exists():
            rows = read_table(tables / f"{name}.csv")
            draw_comparison(rows, tables / name, title=f"{title_of(study)}, {_trials(rows)} random splits")
            command = f"`silodp reproduce {name}{'' if study.dataset == 'wbcd' else ' --data-dir DIR'}`"
            yield rows, name, [f"## {title_of(study)}\n\n{command}\n", f"![{title_of(study)}](figures/{name}.png)\n"]


def reading(rows: Sequence[dict]) -> str:
    """One paragraph: what a figure shows, and whether the paper's claim (SPIDER ahead of both baselines at most epsilons) holds."""
    exact, paper = _ahead(rows, ""), _ahead(rows, "-paper")
    spent = [r for r in rows if r["curve"] == "mb-sgd-paper" and r["spent_epsilon"] > r["epsilon"]]
    words = [
        f"With exact accounting SPIDER, tuned over its forms and phases, is {versus(rows, 'spider', 'mb-sgd')} and "
        f"{versus(rows, 'spider', 'local-sgd')}; with difference clipping and phases > 1 alone it is {versus(rows, 'spider-diff', 'mb-sgd')}.",
        f"With the paper's noise it is {versus(rows, 'spider-paper', 'mb-sgd-paper')}; exact accounting takes "
        f"{improvement(rows, 'spider-paper', 'spider'):.1f} % off the error of SPIDER with the paper's noise.",
        f"The paper's claim, SPIDER ahead of both baselines at most privacy levels, {_holds(*exact)} with exact accounting "
        f"({exact[0]} of {exact[1]} epsilons) and {_holds(*paper)} with the paper's own noise ({paper[0]} of {paper[1]}).",
    ]
    if spent:
        most = max(spent, key=lambda r: r["spent_epsilon"] / r["epsilon"])
        words.append(
            f"The paper's MB-SGD constants spend {rounded_up(most['spent_epsilon'], 2, 'f')} where they claim {most['epsilon']:g}."
        )
    return " ".join(words)


def tuned_over(study: Study) -> str:
    """One sentence: the grid."""
    grid, forms = study.grid, "both forms" if study.grid.alternate else "its first form alone"
    low, high, clips = min(grid.steps), max(grid.steps), ", ".join(f"{c:g}" for c in grid.clips)
    phases = f"phases {min(grid.phases)} to {max(grid.phases)}"
    part = " This is a part of the paper's grid." if study.dataset == "cifar10" else ""
    return f"Tuned over {len(grid.steps)} steps from {low:.3g} to {high:.3g}, clips {clips}, and for SPIDER {phases} in {forms}.{part}"


def versus(rows: Sequence[dict], a: str, b: str) -> str:
    """ "1.2 % lower than MB-SGD (beyond two standard errors at 3 epsilons; higher at 1)", by differences paired over the splits."""
    percent = improvement(rows, b, a)
    better, worse = _beyond(rows, a, b)
    word = "lower" if percent >= 0 else "higher"
    return f"{abs(percent):.1f} % {word} than {_short(b)} (beyond two standard errors: better at {better}, worse at {worse} epsilons)"


def _beyond(rows: Sequence[dict], a: str, b: str) -> tuple[int, int]:
    """At how many epsilons the paired difference is more than two standard errors below, and above, zero."""
    errors = {(r["curve"], r["epsilon"]): r["errors"] for r in rows}
    better = worse = 0
    for (curve, epsilon), mine in errors.items():
        if curve == a and len(mine) > 1 and (b, epsilon) in errors:
            gaps = [x - y for x, y in zip(mine, errors[b, epsilon], strict=True)]
            bar = 2 * statistics.stdev(gaps) / math.sqrt(len(gaps))
            better += statistics.mean(gaps) < -bar
            worse += statistics.mean(gaps) > bar
    return better, worse


def _ahead(rows: Sequence[dict], suffix: str) -> tuple[int, int]:
    """At how many epsilons, of how many, SPIDER's mean error is below both baselines'."""
    error = {(r["curve"], r["epsilon"]): r["test_error"] for r in rows}
    mine = {e: v for (c, e), v in error.items() if c == f"spider{suffix}"}
    return sum(v < min(error[f"mb-sgd{suffix}", e], error[f"local-sgd{suffix}", e]) for e, v in mine.items()), len(mine)


def _holds(ahead: int, of: int) -> str:
    return "holds" if ahead > of / 2 else "does not hold"


# --- the leaderboard --------------------------------------------------------------------------------------------------------------


def _leaderboard(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# Leaderboard: ISRL-DP methods under the same exact budget\n",
        "Test error in per cent, mean over the random splits ± standard error; the least of each row is bold. Every method spends the "
        f"epsilon of its row, at delta = 1/n², by exact accounting. {NOTE} Steps are those of the paper's grids; on CIFAR-10 they end at 1, "
        "and with so few rounds plain steps of that size, private or not, do not get far: what momentum and Adam gain there is speed.\n",
        "`silodp reproduce leaderboard --data-dir DIR`, then `silodp gallery`.\n",
    ]
    for name, study in LEADERBOARD.items():
        if (tables / f"{name}.csv").exists():
            rows = read_table(tables / f"{name}.csv")
            parts.append(f"## {title_of(study)}, {_trials(rows)} splits\n\n{_grid(rows, study)}\n\n{_margins(rows)}\n")
    return _write(docs / "leaderboard.md", parts)


def _grid(rows: Sequence[dict], study: Study) -> str:
    cells = {(r["curve"], r["epsilon"]): r for r in rows}
    curves = [c for c in study.methods if any(c == curve for curve, _ in cells)]
    lines = ["| epsilon | " + " | ".join(_short(c) for c in curves) + " |", "|---:|" + "---:|" * len(curves)]
    for epsilon in study.epsilons:
        mine = [cells[c, epsilon] for c in curves]
        least = min(r["test_error"] for r in mine if not r["curve"].endswith("-paper"))
        texts = [f"{100 * r['test_error']:.1f} ± {100 * r['standard_error']:.1f}" for r in mine]
        bold = [f"**{t}**" if r["test_error"] == least else t for r, t in zip(mine, texts, strict=True)]
        lines.append(f"| {epsilon:g} | " + " | ".join(bold) + " |")
    return "\n".join(lines)


def _margins(rows: Sequence[dict]) -> str:
    """Which one method is best on average, and how it stands to the baselines."""
    curves = [c for c in dict.fromkeys(r["curve"] for r in rows) if not c.endswith("-paper")]
    best = max(curves, key=lambda c: improvement(rows, "spider-paper", c))
    over = [b for b in ("spider-paper", "mb-sgd", "local-sgd") if b != best]
    return f"Best on average: **{_short(best)}**, " + "; ".join(versus(rows, best, b) for b in over) + "."


# --- where variance reduction helps -----------------------------------------------------------------------------------------------


def _variance(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# Where variance reduction helps\n",
        "SPIDER with difference clipping (phase > 1, its best share of the budget) against MB-SGD, both tuned over the same grid under the "
        "same exact budget: test error of SPIDER / MB-SGD in per cent, relative change (negative: SPIDER is better), and whether the "
        "differences, paired over the random splits, are beyond two standard errors. SPIDER's anchors take every record, also where "
        "differences and MB-SGD's gradients take small batches: there it looks at more records for the same budget.\n",
        "`silodp reproduce variance --data-dir DIR`, then `silodp gallery`.\n",
        "| setting | " + " | ".join(f"epsilon {e:g}" for e in VARIANCE_EPSILONS) + " | no noise |",
        "|---|" + "---:|" * (len(VARIANCE_EPSILONS) + 1),
    ]
    lines: list[str] = []
    for name, study in VARIANCE.items():
        if (tables / f"{name}.csv").exists():
            rows = read_table(tables / f"{name}.csv")
            cells = [_change([r for r in rows if r["epsilon"] == e], "spider-diff", "mb-sgd") for e in study.epsilons]
            lines.append(f"| {_setting(study)} | " + " | ".join([*cells, _change(rows, "spider-diff-open", "mb-sgd-open")]) + " |")
    cells = [cell for line in lines for cell in line.split(" | ")[1:4]]
    said = (
        f"With noise, SPIDER is better beyond two standard errors in {sum('better' in c for c in cells)} of {len(cells)} cells and worse in "
        f"{sum('worse' in c for c in cells)}. Variance reduction pays where batches are small and the budget is not: the noise of sampling "
        "is then what a difference takes away. On full batches there is no such noise, and the budget that anchors and differences share "
        "is better spent on plain gradients.\n"
    )
    return _write(docs / "variance.md", [*parts[:-2], "\n".join([*parts[-2:], *lines]) + "\n", said]) if lines else None


VARIANCE_EPSILONS = next(iter(VARIANCE.values())).epsilons


def _change(rows: Sequence[dict], a: str, b: str) -> str:
    rows = [r for r in rows if r["curve"] in (a, b)]
    if len(rows) < 2:
        return ""
    better, worse = _beyond(rows, a, b)
    mine, other = (next(100 * r["test_error"] for r in rows if r["curve"] == curve) for curve in (a, b))
    return f"{mine:.1f} / {other:.1f}, {-improvement(rows, b, a):+.1f} %" + (" **better**" if better else " worse" if worse else "")


def _setting(study: Study) -> str:
    silos = (
        f"{study.cohort} of {DATASETS[study.dataset].silos} silos a round" if study.cohort else f"all {DATASETS[study.dataset].silos} silos"
    )
    return f"{TITLES[study.dataset]}, R = {study.rounds}, {silos}, {study.sampling} batches"


# --- what a shuffler buys -----------------------------------------------------------------------------------------------------------


def _trust(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# What a shuffler buys\n",
        "The same algorithms with the same grids under ISRL-DP (nobody is trusted), SDP (a shuffler adds the silos' counts, and passes a total "
        "on once all silos are in it) and central DP (one gate for all records). ISRL-DP is accounted exactly; SDP by the binomial accountant "
        f"at one Renyi order, and central DP by Renyi accounting too. {NOTE}\n",
    ]
    for rows, name, heading in _drawn(TRUST, tables):
        parts += [*heading, f"[Table](figures/{name}.csv).\n", "\n".join(_trust_table(rows, TRUST[name])) + "\n"]
    return _write(docs / "trust.md", parts)


def _trust_table(rows: Sequence[dict], study: Study) -> list[str]:
    """Test errors by epsilon, and SDP's distance from central DP."""
    by = {(r["curve"], r["epsilon"]): r for r in rows}
    lines = ["| epsilon | method | ISRL-DP | SDP | central DP | SDP over central |", "|---:|---|---:|---:|---:|---:|"]
    for e in study.epsilons:
        for name, isrl in (("MB-SGD", "mb-sgd"), ("SPIDER", "spider-diff")):
            three = [by[c, e] for c in (isrl, f"{name.lower()}-shuffle", f"{name.lower()}-central")]
            cells = " | ".join(f"{100 * r['test_error']:.2f} ± {100 * r['standard_error']:.2f}" for r in three)
            lines.append(f"| {e:g} | {name} | {cells} | {100 * (three[1]['test_error'] / three[2]['test_error'] - 1):+.1f} % |")
    return lines


# --- words ------------------------------------------------------------------------------------------------------------------------


def _short(curve: str) -> str:
    return {
        "spider-diff": "SPIDER, phase > 1",
        "mb-sgd": "MB-SGD",
        "local-sgd": "Local SGD",
        "spider-paper": "SPIDER, paper's noise",
        "mb-sgd-paper": "MB-SGD",
    }.get(curve, CURVES[curve])


def _trials(rows: Sequence[dict]) -> int:
    return len(rows[0]["errors"])


def _write(path: Path, parts: Sequence[str]) -> Path | None:
    if not any("##" in part or "| " in part for part in parts):
        return None
    path.write_text("\n".join(parts))
    return path
