"""Pages of results: each figure redrawn from its small table, with a paragraph that says what it
shows, and the leaderboard.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scipy import stats

from research import rates
from research.compare import NOTE, improvement, read_table
from research.datasets import DATASETS
from research.figures import draw_comparison, draw_panels, draw_rates
from research.study import CURVES, FEATURES, FIGURES, LEADERBOARD, TRUST, VARIANCE, Study
from research.trusts import trust_table
from research.verdict import read_trials
from research.verdict_read import TITLES as VERDICT_TITLES
from research.verdict_read import Trials
from research.verdict_tables import write_verdict_tables
from silodp.core.figures import rounded_up
from silodp.host import atomic

VERDICT_LINES = {
    "mb-sgd": "MB-SGD = SPIDER, phase 1",
    "phases": "SPIDER, phase > 1",
    "alternate": "alternate form",
    "local-sgd": "Local SGD",
}
"""The lines of verdict.png, by method."""
TITLES = {"wbcd": "Wisconsin breast cancer", "mnist": "MNIST, odd or even", "cifar10": "CIFAR-10"}


def write_gallery(docs: Path, tables: Path) -> list[Path]:
    """Write figures.md, leaderboard.md, variance.md, trust-errors.md and verdict-tables.md in
    `docs` and verdict.png in `tables` from the tables NAME.csv in `tables`, and rates-table.md and
    rates.png from rates.csv in `docs`. Leave out a page without a table. (docs/verdict.md is
    written by hand.)
    """
    pages = [
        write(docs, tables)
        for write in (_figures, _leaderboard, _variance, _trust, _verdict_tables, _draw_verdict)
    ]
    if (docs / "rates.csv").exists():
        fits = rates.read(docs / "rates.csv")
        draw_rates(fits, docs, suffixes=(".png",))
        pages += [_rates_table(docs, fits), docs / "rates.png"]
    return [page for page in pages if page]


def _rates_table(docs: Path, fits: Sequence[Mapping]) -> Path:
    """Write rates-table.md: one row for each measured slope."""
    lines = [
        "# The table of slopes",
        "",
        "`python -m research gallery` writes this page from [rates.csv](rates.csv).",
        "[The theorems as slopes](rates.md) explains the columns.",
        "",
        "| theorem | algorithm | against | slope ± s.e. | theory | as run | verdict |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for fit in fits:
        slope = f"{fit['slope']:+.2f} ± {fit['slope_error']:.2f}"
        expected = f"{fit['theory']:+.2f} | {fit['as_run']:+.2f}"
        name = f"{fit['theorem']} | {fit['algorithm']} | {fit['against']}"
        lines.append(f"| {name} | {slope} | {expected} | {fit['verdict']} |")
    path = docs / "rates-table.md"
    atomic.write(path, "\n".join(lines) + "\n", mode=0o644, durable=False)
    return path


def _verdict_tables(docs: Path, tables: Path) -> Path | None:
    """Write verdict-tables.md from verdict.csv."""
    path = tables / "verdict.csv"
    if not path.exists():
        return None
    return write_verdict_tables(docs, Trials(read_trials(path)))


def _draw_verdict(docs: Path, tables: Path) -> Path | None:
    """Draw verdict.png from verdict.csv: the primary comparison, a panel for each figure."""
    path = tables / "verdict.csv"
    if not path.exists():
        return None
    trials = Trials(read_trials(path))
    panels = {}
    for figure in trials.figures:
        epsilons = trials.epsilons(figure, "primary")
        if not epsilons:
            continue
        lines = {}
        for method, label in VERDICT_LINES.items():
            curves = [(e, trials.curve(method, figure, "primary", e)) for e in epsilons]
            lines[label] = [(e, curve.error) for e, curve in curves if curve]
        panels[VERDICT_TITLES[figure]] = lines
    draw_panels(panels, tables / "verdict")
    return tables / "verdict.png"


def title_of(study: Study) -> str:
    if study.cohort:
        silos = f"M = {study.cohort}, "
    else:
        silos = ""
    return f"{TITLES[study.dataset]}, {silos}R = {study.rounds}"


# --- the paper's figures -------------------------------------------------------------------------


def _figures(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# The paper's figures, with exact accounting\n",
        (
            "**Under our protocol we do not see SPIDER ahead of full-batch MB-SGD. Our "
            "protocol is not the authors'**, and in more than the "
            "accounting: [the differences are below](#how-our-study-differs-from-the-authors). "
            "[A verdict on the paper's experiments](verdict.md) has the result under the "
            "authors' protocol.\n"
        ),
        (
            f"{NOTE} {SIGNIFICANCE}\n\nWith exact accounting SPIDER at phase 1 is MB-SGD. Where "
            "tuning picks phase 1, both are the same runs. Where M of 25 silos answer a round, "
            "the noise is set for a silo that is asked in every round, and less is spent.\n"
        ),
        DIFFERENCES,
    ]
    for rows, name, heading in _drawn(FIGURES, tables):
        parts += [
            heading[0],
            *heading[1:],
            small_table(rows, FIGURES[name]),
        ]
        parts.append(
            f"{_few(FIGURES[name])}{_spending(rows)} {tuned_over(FIGURES[name])} "
            f"[Table](figures/{name}.csv).\n"
        )
    return _write(docs / "figures.md", parts)


def small_table(rows: Sequence[dict], study: Study) -> str:
    """What a figure of ours shows: each method against MB-SGD with noise of the same kind."""
    lines = [
        "| under our protocol | against MB-SGD | significantly better / worse |",
        "|---|---:|---:|",
    ]
    for curve, other in (
        ("spider", "mb-sgd"),
        ("spider-diff", "mb-sgd"),
        ("local-sgd", "mb-sgd"),
        ("spider-paper", "mb-sgd-paper"),
        ("local-sgd-paper", "mb-sgd-paper"),
    ):
        if any(r["curve"] == curve for r in rows):
            better, worse = significant(rows, curve, other)
            lines.append(
                f"| {CURVES[curve]} | {-improvement(rows, other, curve):+.1f} % | {better} "
                f"/ {worse} of {len(study.epsilons)} |"
            )
    return "\n".join(lines) + "\n"


def _few(study: Study) -> str:
    if study.dataset == "cifar10" or study.trials < 10:
        return "So few settings and splits are no ground for a verdict. "
    return ""


DIFFERENCES = """## How our study differs from the authors'

These points are from the paper's appendix and from the file that its authors published. The file
does not run as published, so we do not know what made their figures.

| point | the authors | here |
|---|---|---|
| steps | "evenly spaced points between e^-9 and 1"; the file spaces the exponents evenly | the points themselves are evenly spaced: of the five on MNIST four are 0.25 or more |
| SPIDER's differences | both gradients are clipped to L, then subtracted, so that the estimate telescopes | with the paper's noise the difference itself is clipped at 2 L (the same sensitivity, 4 L/n), with exact accounting at slope x move if that is less |
| batches of MB-SGD and SPIDER | the file: K = n sqrt(24)/(2 sqrt(R)), 0.24 to 0.49 of the records, and sqrt(q) times that at phase q, with replacement; the text has epsilon in the place of 24 | all records |
| Local SGD | K steps a round, each on one record; the file replaces SGD by Adam; a grid of steps of its own | 2 (breast cancer: 2 or 4) steps a round on all records, and the same grid |
| SPIDER at phase 1 | the algorithm of MB-SGD; the text's constant has 16 L^2 R ln(1/delta) where MB-SGD's is 8 L^2 R ln(2/delta), the file's 16 L^2 ln(1/delta) | with the paper's noise the text's: the same algorithm with more noise; with exact accounting MB-SGD |
| noise | the text, over (n epsilon)^2: 16 L^2 max(R/q, 1) ln(1/delta) for anchors, 64 L^2 R ln(1/delta) for differences, in the alternate form 8 and 32 L^2 R ln(2/delta); the file leaves max(R/q, 1) out, and clips each tensor by itself | the constants in the paper's text |
| output | the iterate with the least training loss, which is not private | the last iterate |
| MNIST | 774 images of each digit in all, so that silos share some | 3,870 of each, none shared |
| CIFAR-10 | 12 or 8 steps from e^-5 | 2 steps, 1 clip, phases 1 and 2, no alternate form, 3 epsilons, 3 splits: too few for a verdict |
| trials | 10; what error bars are is not stated | 10 splits that overlap (CIFAR-10: 3) |
"""  # noqa: E501
"""Where the protocol of our study is not that of the paper's experiments; what other pages link to.
"""


def _drawn(
    studies: Mapping[str, Study], tables: Path
) -> Iterator[tuple[list[dict], str, list[str]]]:
    """Each study that has a table: its rows, its name, and the head of its section with the figure,
    drawn anew.
    """
    for name, study in studies.items():
        if (tables / f"{name}.csv").exists():
            rows = read_table(tables / f"{name}.csv")
            draw_comparison(
                rows, tables / name, title=f"{title_of(study)}, {_trials(rows)} random splits"
            )
            command = (
                "`python -m research figures "
                f"{name}{'' if study.dataset == 'wbcd' else ' --data-dir DIR'}`"
            )
            yield (
                rows,
                name,
                [
                    f"## {title_of(study)}\n\n{command}\n",
                    f"![{title_of(study)}](figures/{name}.png)\n",
                ],
            )


def reading(rows: Sequence[dict], study: Study) -> str:
    """One paragraph: what a figure shows, under our protocol."""
    first = [
        r
        for r in rows
        if r["curve"] == "spider-paper"
        and r["algorithm"] == "spider"
        and r["settings"].get("phase") == 1
    ]
    words = [
        (
            "With exact accounting SPIDER, tuned over its forms and phases, is "
            f"{versus(rows, 'spider', 'mb-sgd')} and "
            f"{versus(rows, 'spider', 'local-sgd')}; with difference clipping and phases > 1 "
            f"alone it is {versus(rows, 'spider-diff', 'mb-sgd')}."
        ),
        (
            f"With the paper's constants it is {versus(rows, 'spider-paper', 'mb-sgd-paper')}; "
            f"at {len(first)} of {len(study.epsilons)} epsilons it "
            "then picks phase 1, which is MB-SGD with a larger constant."
        ),
        (
            f"Exact accounting {_takes(improvement(rows, 'spider-paper', 'spider'))} the error "
            "of SPIDER with the paper's constants, and "
            f"{_takes(improvement(rows, 'mb-sgd-paper', 'mb-sgd'))} MB-SGD's. {_spending(rows)}"
        ),
    ]
    if few := _few(study):
        words.append(few.rstrip())
    else:
        ahead = significant(rows, "spider", "mb-sgd")[0] > len(study.epsilons) / 2
        words.append(
            f"Under our protocol we {'see' if ahead else 'do not see'} SPIDER ahead of "
            "full-batch MB-SGD."
        )
    return " ".join(words)


def _takes(percent: float) -> str:
    if percent >= 0:
        return f"takes {percent:.1f} % off"
    return f"adds {-percent:.1f} % to"


def _spending(rows: Sequence[dict]) -> str:
    """What the paper's constants spend, at the least and at the largest claim."""
    said = []
    for curve, name in (("spider-paper", "SPIDER"), ("mb-sgd-paper", "MB-SGD")):
        mine = sorted((r["epsilon"], r["spent_epsilon"]) for r in rows if r["curve"] == curve)
        low, high = (
            f"{rounded_up(spent, 2, 'f')} at {claim:g}" for claim, spent in (mine[0], mine[-1])
        )
        said.append(f"{name} {low} and {high}")
    return f"The paper's constants spend something else than they claim: {', '.join(said)}."


def tuned_over(study: Study) -> str:
    """One sentence: the grid."""
    grid = study.grid
    if study.grid.alternate:
        forms = "both forms"
    else:
        forms = "its first form alone"
    low = min(grid.steps)
    high = max(grid.steps)
    clips = ", ".join(f"{c:g}" for c in grid.clips)
    phases = f"phases {min(grid.phases)} to {max(grid.phases)}"
    if study.dataset == "cifar10":
        part = " This is a small part of the paper's grid."
    else:
        part = ""
    return (
        f"Tuned over {len(grid.steps)} steps from {low:.3g} to {high:.3g}, clips {clips}, and "
        f"for SPIDER {phases} in {forms}.{part}"
    )


BY_CHANCE = "With so many cells, some significant differences are chance."
SIGNIFICANCE = (
    "Error bars are standard errors over the random splits. The splits overlap, so chance is "
    "larger than the bars. *Significant* is a difference, paired over the splits, at 95 % by "
    f"Nadeau and Bengio's test, which allows for the overlap. {BY_CHANCE}"
)
EXPLAINED = f"[The figures](figures.md) explain error bars and *significant*. {BY_CHANCE}"
"""What the other pages have in the place of SIGNIFICANCE."""
TEST_OVER_TRAINING = 0.25
"""Records of every split: a fifth to test on."""


def versus(rows: Sequence[dict], a: str, b: str) -> str:
    """ "1.2 % lower than MB-SGD (significantly better at 3, worse at 1 of 7 epsilons)", by
    differences paired over the splits.
    """
    percent = improvement(rows, b, a)
    better, worse = significant(rows, a, b)
    word = "lower" if percent >= 0 else "higher"
    of = sum(r["curve"] == a for r in rows)
    return (
        f"{abs(percent):.1f} % {word} than {_short(b)} (significantly better at {better}, "
        f"worse at {worse} of {of} epsilons)"
    )


def significant(rows: Sequence[dict], a: str, b: str) -> tuple[int, int]:
    """At how many epsilons `a` has significantly less, and more, test error than `b`.

    Nadeau and Bengio 2003: T splits of the same records share most of what they train on, so the
    variance of the mean difference is taken as (1/T + test/training) times that between splits,
    with a t quantile.
    """
    errors = {(r["curve"], r["epsilon"]): r["errors"] for r in rows}
    better = worse = 0
    for (curve, epsilon), mine in errors.items():
        if curve == a and (splits := len(mine)) > 1 and (b, epsilon) in errors:
            gaps = [x - y for x, y in zip(mine, errors[b, epsilon], strict=True)]
            bar = (
                float(stats.t.ppf(0.975, splits - 1))
                * statistics.stdev(gaps)
                * math.sqrt(1 / splits + TEST_OVER_TRAINING)
            )
            better += statistics.mean(gaps) < -bar
            worse += statistics.mean(gaps) > bar
    return better, worse


# --- the leaderboard -----------------------------------------------------------------------------


def _leaderboard(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# Leaderboard: ISRL-DP methods under the same exact budget\n",
        "",
        "CIFAR-10 has a small grid and few splits, which is no ground for a verdict.\n",
        "`python -m research figures leaderboard --data-dir DIR`, then `python -m research "
        "gallery`, repeat the study.\n",
        "## How to read the tables\n",
        (
            "Test error in per cent, mean over the random splits ± standard error. The least "
            "of each row is bold.\n\n"
            "- **Budget.** Every method but the first column's spends the epsilon of its row, at "
            "delta = 1/n², by exact accounting.\n"
            "- **First column.** It has the paper's constants. They spend the epsilon in "
            "brackets, more or less than the row. So this column is no comparison at the same "
            "budget, and never bold.\n"
            f"- **Not charged.** {NOTE}\n"
            f"- **Chance.** {EXPLAINED}\n"
            "- **Steps** lie between the ends of the paper's grids, evenly spaced ([how our study "
            "differs from the authors'](figures.md#how-our-study-differs-from-the-authors)).\n"
            "- **Convex methods.** Accelerated and localized MB-SGD are made for convex losses, "
            "and the networks' losses are not convex. They are tuned over disjoint and full "
            "batches too.\n"
            "- **Last column.** It is another model under the same budget on the same splits, "
            "and no method on the paper's network.\n"
            "- **Missing columns.** A method without a column was not run there.\n"
        ),
    ]
    summary = [SUMMARY]
    for name, study in LEADERBOARD.items():
        if (tables / f"{name}.csv").exists():
            rows = read_table(tables / f"{name}.csv")
            linear = tables / f"{name}-linear.csv"
            beside = read_table(linear) if linear.exists() else []
            summary.append(_summary_row(rows, beside, study))
            said = [
                _grid(rows + beside, study),
                _margins(rows, study),
                *_beside(rows, beside, FEATURES.get(f"{name}-linear")),
            ]
            parts.append(
                f"## {title_of(study)}, {_trials(rows)} splits\n\n" + "\n\n".join(said) + "\n"
            )
    if len(summary) == 1:
        return None
    parts[1] = "\n".join(summary) + "\n"
    return _write(docs / "leaderboard.md", parts)


SUMMARY = """\
Least test error on average over the epsilons, relative to MB-SGD at the same exact budget:

| data | best method on the paper's network | against MB-SGD | significantly better / worse | \
logistic regression |
|---|---|---:|---:|---:|"""
"""The head of the leaderboard's first table."""


def _summary_row(rows: Sequence[dict], linear: Sequence[dict], study: Study) -> str:
    """Return the row of one data set in the leaderboard's first table."""
    best = _best(rows)
    better, worse = significant(rows, best, "mb-sgd")
    known = {r["epsilon"] for r in rows}
    same = [*rows, *(r for r in linear if r["epsilon"] in known)]
    beside = f"{-improvement(same, 'mb-sgd', 'linear'):+.1f} %" if linear else ""
    return (
        f"| {title_of(study)} | {_short(best)} | {-improvement(rows, 'mb-sgd', best):+.1f} % | "
        f"{better} / {worse} of {len(study.epsilons)} | {beside} |"
    )


def _best(rows: Sequence[dict]) -> str:
    """Return the method with the least error relative to MB-SGD, without the paper's constants."""
    curves = [c for c in dict.fromkeys(r["curve"] for r in rows) if not c.endswith("-paper")]
    return max(curves, key=lambda c: improvement(rows, "mb-sgd", c))


def _beside(rows: Sequence[dict], linear: Sequence[dict], study: Study | None) -> list[str]:
    """What the column of the linear model is, how it stands to MB-SGD, and at which epsilons beside
    the table's own it was run.
    """
    if not (study and linear):
        return []
    if study.features:
        seen = f"the public features `{study.features}` ([pictures](images.md))"
    else:
        seen = "the same standardised features"
    grid = (
        f"steps {', '.join(f'{s:g}' for s in study.grid.steps)}, clips "
        f"{', '.join(f'{c:g}' for c in study.grid.clips)}"
    )
    if study.features:
        free = (
            " That tuning, and ours of the map's few settings by hand, are the only uncharged "
            "looks at the data."
        )
    else:
        free = ""
    known = {r["epsilon"] for r in rows}
    more = [
        f"{100 * r['test_error']:.1f} ± {100 * r['standard_error']:.1f} at epsilon {r['epsilon']:g}"
        for r in linear
        if r["epsilon"] not in known
    ]
    margin = versus([*rows, *(r for r in linear if r["epsilon"] in known)], "linear", "mb-sgd")
    others = f" It is also {' and '.join(more)}." if more else ""
    return [
        (
            f"**{_short('linear')}**, the last column, takes R = {study.rounds} rounds from zero "
            f"on {seen}, with momentum {study.grid.momenta[0]:g}. It is tuned by training loss "
            f"over {grid}.{free} Its error is {margin}.{others}"
        )
    ]


def _grid(rows: Sequence[dict], study: Study) -> str:
    cells = {(r["curve"], r["epsilon"]): r for r in rows}
    curves = [c for c in (*study.methods, "linear") if any(c == curve for curve, _ in cells)]
    lines = [
        "| epsilon | " + " | ".join(_short(c) for c in curves) + " |",
        "|---:|" + "---:|" * len(curves),
    ]
    for epsilon in study.epsilons:
        mine = [cells[c, epsilon] for c in curves]
        least = min(r["test_error"] for r in mine if not r["curve"].endswith("-paper"))
        spent = [
            f" (spends {rounded_up(r['spent_epsilon'], 2, 'f')})"
            if r["curve"].endswith("-paper")
            else ""
            for r in mine
        ]
        texts = [
            f"{100 * r['test_error']:.1f} ± {100 * r['standard_error']:.1f}{more}"
            for r, more in zip(mine, spent, strict=True)
        ]
        bold = [
            f"**{t}**" if r["test_error"] == least else t for r, t in zip(mine, texts, strict=True)
        ]
        lines.append(f"| {epsilon:g} | " + " | ".join(bold) + " |")
    return "\n".join(lines)


def _margins(rows: Sequence[dict], study: Study) -> str:
    """Which one method is best on average, and how it stands to the baselines of the same
    budget.
    """
    best = _best(rows)
    over = [b for b in ("local-sgd", "spider-diff") if b != best]
    said = (
        f"Least on average, relative to MB-SGD: **{_short(best)}**. Its error is:\n\n- "
        + "\n- ".join(versus(rows, best, b) for b in over)
    )
    if study.dataset == "cifar10":
        said += (
            f"\n\nThis is no verdict: {len(study.grid.steps)} steps that end at "
            f"{max(study.grid.steps):g}, one clip and {study.trials} splits. Plain "
            "steps of that size do not get far in so few rounds, private or not, and "
            "methods that move faster are ahead."
        )
    return said


# --- where variance reduction helps --------------------------------------------------------------


def _variance(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# Where variance reduction helps\n",
        (
            "SPIDER's variance reduction helps on small batches of MNIST with a large budget. Each "
            "cell has the test error of SPIDER / MB-SGD in per cent and the relative change. A "
            "negative change means that SPIDER is better. The word marks a significant change.\n"
        ),
        (
            "Both methods are tuned over the same steps and clips under the same exact budget. "
            "SPIDER has difference clipping, phase > 1, and the default share of the budget for "
            "its anchors. Its anchors take every record, also where differences and MB-SGD's "
            "gradients take small batches. There SPIDER uses more records for the same budget. "
            "This is our protocol, "
            "[not the paper's](figures.md#how-our-study-differs-from-the-authors), and no "
            "verdict on it.\n"
        ),
        f"{EXPLAINED}\n",
        (
            "`python -m research figures variance --data-dir DIR`, then `python -m research "
            "gallery`.\n"
        ),
        "| setting | " + " | ".join(f"epsilon {e:g}" for e in VARIANCE_EPSILONS) + " | no noise |",
        "|---|" + "---:|" * (len(VARIANCE_EPSILONS) + 1),
    ]
    lines: list[str] = []
    for name, study in VARIANCE.items():
        if (tables / f"{name}.csv").exists():
            rows = read_table(tables / f"{name}.csv")
            cells = [
                _change([r for r in rows if r["epsilon"] == e], "spider-diff", "mb-sgd")
                for e in study.epsilons
            ]
            lines.append(
                f"| {_setting(study)} | "
                + " | ".join([*cells, _change(rows, "spider-diff-open", "mb-sgd-open")])
                + " |"
            )
    cells = [cell for line in lines for cell in line.split(" | ")[1:4]]
    small = [cell for line in lines if "poisson" in line for cell in line.split(" | ")[1:4]]
    better, worse = (sum(word in cell for cell in cells) for word in ("better", "worse"))
    said = (
        f"With noise, SPIDER is significantly better in {better} of {len(cells)} cells, "
        f"{sum('better' in c for c in small)} of them on small "
        f"batches, and worse in {worse}. A likely reason: a difference removes the noise of "
        "sampling, which full batches do not have. There plain gradients make better use of the "
        "budget that anchors and differences share.\n"
    )
    if lines:
        return _write(
            docs / "variance.md", [*parts[:-2], "\n".join([*parts[-2:], *lines]) + "\n", said]
        )
    return None


VARIANCE_EPSILONS = next(iter(VARIANCE.values())).epsilons


def _change(rows: Sequence[dict], a: str, b: str) -> str:
    rows = [r for r in rows if r["curve"] in (a, b)]
    if len(rows) < 2:
        return ""
    better, worse = significant(rows, a, b)
    mine, other = (
        next(100 * r["test_error"] for r in rows if r["curve"] == curve) for curve in (a, b)
    )
    return f"{mine:.1f} / {other:.1f}, {-improvement(rows, b, a):+.1f} %" + (
        " **better**" if better else " worse" if worse else ""
    )


def _setting(study: Study) -> str:
    if study.cohort:
        silos = f"{study.cohort} of {DATASETS[study.dataset].silos} silos a round"
    else:
        silos = f"all {DATASETS[study.dataset].silos} silos"
    return f"{TITLES[study.dataset]}, R = {study.rounds}, {silos}, {study.sampling} batches"


# --- what trust costs ----------------------------------------------------------------------------


def _trust(docs: Path, tables: Path) -> Path | None:
    parts = [
        "# What trust costs in errors\n",
        (
            "The same algorithms and grids under each trust of [trust.md](trust.md). All budgets "
            "are accounted exactly, by the rule gdp. Test errors are in per cent, with standard "
            f"errors over random splits. {NOTE}\n"
        ),
    ]
    for rows, name, heading in _drawn(TRUST, tables):
        parts += [
            *heading,
            f"[Table](figures/{name}.csv).\n",
            "\n".join(trust_table(rows, TRUST[name])) + "\n",
        ]
    if len(parts) == 2:
        return None
    return _write(docs / "trust-errors.md", parts)


# --- words ---------------------------------------------------------------------------------------


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
    atomic.write(path, "\n".join(parts), mode=0o644, durable=False)
    return path
