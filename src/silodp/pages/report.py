"""The report of one run: a page that stands alone, to be read, printed and signed. `silodp ui`
shows its parts too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

from silodp.core.figures import EARLY, rounded_up, shown
from silodp.pages.aim import aim
from silodp.pages.budgets import budgets
from silodp.pages.charts import Series, chart
from silodp.pages.checked import Checked, badges
from silodp.pages.compared import compared
from silodp.pages.effects import effects
from silodp.pages.judged import headline, judged
from silodp.pages.markup import (
    Markup,
    counts,
    document,
    facts,
    folded,
    join,
    section,
    sentence,
    table,
    tag,
    text,
)
from silodp.pages.runs import Run, fingerprint, noise_share, readable
from silodp.pages.statistics import answers, paid, sentence_of
from silodp.pages.trade_off import trade_off
from silodp.pages.unprotected import sentences

KINDS = {
    "train": "private training run (simulation)",
    "federation": "private training run over silos",
    "compare": "comparison (simulation)",
    "statistics": "private answers",
}
WORDS = {
    "spider": "SPIDER",
    "mb-sgd": "MB-SGD",
    "local-sgd": "Local SGD",
    "diff2": "DIFF2",
    "scaffold": "DP-SCAFFOLD",
    "disk": "DiSK",
    "diff2-local": "DIFF2 with local steps",
    "accelerated": "Accelerated MB-SGD",
    "localized": "Localized MB-SGD",
    "momentum": "MB-SGD with momentum",
    "adam": "MB-SGD with Adam",
    "balanced": "MB-SGD, half of the silos in turn",
}
TAKEN = {
    "phase": ("spider", "diff2", "diff2-local"),
    "slope": ("spider", "spider-alternate", "diff2", "diff2-local", "prox-svrg", "prox-pl-svrg"),
    "local_steps": ("local-sgd", "scaffold", "diff2-local"),
    "inner": ("prox-svrg", "prox-pl-svrg"),
    "restarts": ("prox-pl-svrg", "accelerated"),
    "momentum": ("momentum", "adam"),
    "kappa": ("disk",),
}
"""The algorithms that use each setting, for runs over a network."""
MUCH = (
    "Training still works: the noise points in another direction in each question and averages "
    "out, while the signal of the records adds up."
)
LITTLE = "In most questions the signal of the records is larger than the noise."
COLOURS = {
    "spider": 0,
    "spider-diff": 5,
    "mb-sgd": 1,
    "local-sgd": 3,
    "diff2": 2,
    "scaffold": 4,
    "disk": 6,
}


def report(
    run: Run,
    audit: Sequence[dict[str, Any]] = (),
    *,
    checks: Sequence[Checked] = (),
    statistics: Sequence[dict[str, Any]] = (),
    raw: bool = False,
) -> str:
    """Return the whole page as text. The page loads nothing from elsewhere.

    `checks` are the results of the verifications made for this page. `statistics` are answers to
    `silodp stats`, to be shown too.

    With `raw` it also has figures that a simulation computed on raw records: for the analyst.
    """
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    with readable(run.folder):
        if run.kind == "statistics":
            parts = [head(run, checks), *answers(run.statistics), not_protected(run)]
        else:
            parts = [head(run, checks), *body(run, audit, raw=raw), *beside(run, statistics)]
        main = tag("main", *parts, signature(run, when), id="main")
        return document(f"{title(run)}: report", main, policy=True, kind="report")


def beside(run: Run, statistics: Sequence[dict[str, Any]]) -> list[Markup]:
    """Show answers to `silodp stats` beside a training, with their own price."""
    if not statistics:
        return []
    words = (
        f"{sentence_of(statistics)} This price is in addition to that of the training and its "
        "evaluations, as far as the silos are the same."
    )
    return [
        section("statistics", "Other answers of the silos", tag("p", words), paid(statistics)),
        *answers(statistics),
    ]


def title(run: Run) -> str:
    """Return what is predicted from what, or else by what it was trained on what."""
    if run.kind == "statistics":
        return "Statistics over silos"
    if run.kind == "compare":
        return f"What privacy costs on {run.about.get('data') or run.about.get('dataset')}"
    return aim(run) or method(run)


def method(run: Run) -> str:
    """Return by what algorithm a run was trained, and over what."""
    data = run.about.get("data") or run.about.get("dataset")
    where = f"over {_some(run.silos)}"
    if data:
        where = f"on {data}"
    return f"{WORDS.get(run.algorithm, run.algorithm)} {where}"


def head(run: Run, checks: Sequence[Checked] = ()) -> Markup:
    over = tag("p", f"silodp · {KINDS[run.kind]}", class_="over")
    if run.kind in ("train", "federation"):
        over = tag("p", f"silodp · {KINDS[run.kind]} · {method(run)}", class_="over")
    return tag(
        "header",
        over,
        tag("h1", title(run)),
        tag("p", sentence(lead(run)), class_="lead"),
        badges(checks),
        figures(run),
    )


def lead(run: Run) -> str:
    """Return the run in a few sentences: how far it is, and what is differentially private."""
    if run.kind == "compare":
        n = sum(s["records"] for s in run.about.get("silos", ()))
        data = ""
        if n:
            data = f" {n} training records in {_some(run.about['silos'])},"
        return (
            f"Test error by epsilon and algorithm:{data} {run.about.get('trials')} random "
            f"splits, {run.about.get('rounds')} rounds. {run.sentence}"
        )
    if run.kind == "statistics":
        return sentence_of(run.statistics)
    most, delta = (max((s.together[i] for s in run.silos), default=0.0) for i in (0, 1))
    done = f"{run.done} of {run.total} rounds"
    covered = "in training and its evaluations"
    beside = ""
    if run.kind == "federation":
        evaluated = any(s.evaluated for s in run.silos)
        covered = "in this training run"
        others = "Evaluations, profiles"
        if evaluated:
            covered += " and its evaluations"
            others = "Profiles"
        beside = (
            f" {others} and other runs over the same silos are not included: each silo's ledger "
            "adds them up."
        )
    protected = "records"
    if run.of_persons:
        protected = "persons, with all their rows"
    if run.totals:
        protected += " against the server, which sees totals"
    early = ""
    if run.state != "finished":
        early = f" {EARLY}"
    return (
        f"{done} with {_some(run.silos)}. Everything that left a silo {covered} is "
        f"({shown(most)}, {rounded_up(delta)})‑differentially private for each of its "
        f"{protected}{run.provided}.{beside} {run.sentence}{early}"
    )


def figures(run: Run) -> Markup:
    """Show the main numbers of the run."""
    pairs: list[tuple[str, str]] = []
    if run.kind == "statistics":
        return paid(run.statistics)
    if run.kind == "compare":
        best = min(
            (r for r in run.rows if r["epsilon"] and not r["curve"].endswith("-paper")),
            key=lambda r: r["test_error"],
            default=None,
        )
        pairs = [
            ("batches of runs", f"{run.done} of {run.total}"),
            ("random splits", f"{run.about.get('trials')}"),
        ]
        if best:
            pairs.append(
                (
                    (
                        f"lowest private test error ({curve_name(best['curve'])}, ε = "
                        f"{best['epsilon']:g})"
                    ),
                    f"{best['test_error']:.1%}",
                )
            )
        return counts(pairs)
    return join([counts(_main(run), main=True), counts(_more(run))])


def _main(run: Run) -> list[tuple[str, str]]:
    """Return the three numbers that decide: quality, price, and number of hospitals."""
    quality = headline(run)[:1] or [("quality on held-out records", "not measured")]
    most = max(run.silos, key=lambda s: s.together[0], default=None)
    price = ("ε spent", "-")
    if most and most.evaluated:
        price = ("ε spent for each record, with evaluations", shown(most.together[0]))
    elif most:
        price = (f"ε spent, of {rounded_up(most.epsilon, 6)}", shown(most.spent))
    records = [s.records for s in run.silos]
    silos = "silos"
    if records and all(records):
        silos = f"silos, with {sum(n for n in records if n)} records"
    return [*quality, price, (silos, str(len(run.silos)))]


def _more(run: Run) -> list[tuple[str, str]]:
    """Return the other numbers of a training."""
    pairs = [*headline(run)[1:], ("rounds", f"{run.done} of {run.total}")]
    most = max(run.silos, key=lambda s: s.spent, default=None)
    if most and most.evaluated:
        pairs.append((f"ε spent in training, of {rounded_up(most.epsilon, 6)}", shown(most.spent)))
    for name, form in (("test_error", ".1%"), ("test_loss", ".4g")):
        if name in run.summary:
            pairs.append(
                (f"{name.replace('_', ' ')} (not private)", format(run.summary[name], form))
            )
    return pairs


def body(run: Run, audit: Sequence[dict[str, Any]] = (), *, raw: bool = False) -> list[Markup]:
    if run.kind == "compare":
        parts = [what(run), errors(run)]
    else:
        parts = [
            *judged(run),
            *(compared(run) if raw else ()),
            *effects(run),
            budgets(run),
            what(run),
        ]
    parts += [trade_off(run, audit), not_protected(run)]
    if run.kind != "compare":
        parts.append(curve(run))
    return parts


# --- 1: what was trained -------------------------------------------------------------------------


def what(run: Run) -> Markup:
    about = run.about
    shape = about.get("features")
    if isinstance(shape, list):
        shape = " × ".join(map(str, shape))
    if run.kind == "federation":
        settings = {
            k: about[k]
            for k, algorithms in TAKEN.items()
            if run.algorithm in algorithms and k in about
        }
        settings |= dict(said.split("=", 1) for said in about.get("settings") or ())
    else:
        settings = {k: v for k, v in (about.get("settings") or {}).items() if k != "rounds"}
    data = "at the silos"
    seed = about.get("seed")
    if run.kind == "train":
        data = "the silos' own files"
        if seed is None:
            seed = "from the operating system"
    classes = about.get("classes")
    if classes == 0:
        classes = "a number"
    pairs = [
        ("Data", about.get("data") or about.get("dataset") or data),
        ("Study", about.get("study")),
        ("What is protected", sentence(run.unit)),
        ("Features", shape),
        ("Classes", classes or None),
        ("Model", about.get("model")),
        ("Parameters", about.get("parameters")),
        ("Penalty or constraint", about.get("prox")),
        (
            "Algorithm",
            about.get("algorithm")
            or ", ".join(
                dict.fromkeys(
                    curve_name(m.removesuffix("-paper").removesuffix("-open"))
                    for m in about.get("methods", ())
                )
            ),
        ),
        ("Rounds", about.get("rounds")),
        ("Questions", run.questions or None),
        ("Answers of silos", run.answers or None),
        ("Step", _number(about.get("step"))),
        ("Clip", _number(about.get("clip"))),
        (
            "Batches",
            batches(run),
        ),
        ("Who answers", about.get("participation")),
        ("Accounting rule", about.get("rule")),
        ("Feature scaling", about.get("scale")),
        ("Seed", seed),
        *((k.replace("_", " ").capitalize(), _number(v)) for k, v in settings.items()),
        *times(run),
    ]
    rows = [
        (s.name, s.records or "?", rounded_up(s.epsilon, 6), rounded_up(s.delta)) for s in run.silos
    ]
    rows = rows or [(s.get("name"), s.get("records") or "?") for s in about.get("silos", ())]
    caption = "The silos"
    if run.silos:
        caption = "The silos, and the budget of each for this run"
    listed = ""
    ran = ""
    if rows:
        listed = table(
            caption, ("silo", "records", "ε", "δ")[: len(rows[0])], rows, numbers=(1, 2, 3)
        )
    if noise := run.environment.get("noise"):
        versions = "silodp {silodp}, torch {torch}, Python {python}".format(**run.environment)
        ran = tag("p", f"{versions}. Noise: {noise}.", class_="soft small")
    return section("what", "What was trained", facts(pairs), listed, ran)


def batches(run: Run) -> str:
    """Return which records one question uses."""
    sampling = str(run.about.get("sampling") or "every record")
    return sampling.replace("FullBatch()", "every record").replace("full", "every record")


def times(run: Run) -> list[tuple[str, str]]:
    """Return the time of the first answer, the duration up to the last, and an estimate of the time
    left.
    """
    moments = [datetime.fromisoformat(str(r["time"])) for r in run.rounds if r.get("time")]
    if not moments:
        return []
    seconds = max(0.0, (max(moments) - min(moments)).total_seconds())
    found = [
        ("First answer", f"{min(moments):%Y-%m-%d %H:%M} UTC"),
        ("First to last answer", _length(seconds)),
    ]
    if run.state == "running" and 1 < run.done < run.total:
        found.append(
            ("Estimated time left", _length(seconds * (run.total - run.done) / (run.done - 1)))
        )
    return found


def _length(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# --- 2: error by epsilon, or the training curve --------------------------------------------------


def curve_name(curve: str) -> str:
    stem = curve
    noise = ""
    for end, words in (("-paper", ", the paper's noise"), ("-open", ", not private")):
        if stem.endswith(end):
            stem = stem.removesuffix(end)
            noise = words
    phase = ""
    if stem.endswith("-diff"):
        stem = stem.removesuffix("-diff")
        phase = ", phase > 1"
    return f"{WORDS.get(stem, stem)}{phase}{noise}"


def errors(run: Run) -> Markup:
    by: dict[str, list[dict[str, Any]]] = {}
    for row in run.rows:
        by.setdefault(row["curve"], []).append(row)
    if not by:
        words = (
            f"{run.done} of {run.total} batches of runs are done. The figure appears at the end."
        )
        return section("error", "Error by epsilon", tag("p", words))
    epsilons = sorted({r["epsilon"] for r in run.rows if r["epsilon"]})
    exact = []
    paper = []
    for name, rows in by.items():
        stem = name.removesuffix("-paper").removesuffix("-open")
        colour = COLOURS.get(stem, 7)
        if name.endswith("-open"):
            exact.append(
                Series(
                    curve_name(name),
                    [(e, rows[0]["test_error"]) for e in (epsilons[0], epsilons[-1])],
                    colour,
                    "dash",
                )
            )
            continue
        dash = ""
        group = exact
        if name.endswith("-paper"):
            dash = "dot"
            group = paper
        points = [(r["epsilon"], r["test_error"]) for r in rows]
        errors_ = [r["standard_error"] for r in rows]
        group.append(Series(curve_name(name), points, colour, dash, errors_, dots=True))
    about = {
        "across": "ε of every record, by its logarithm",
        "up": "test error",
        "log": True,
        "percent": True,
        "ticks": epsilons,
    }
    bars = f"Bars are standard errors over {run.about.get('trials')} random splits."
    drawn = [
        chart(
            "Test error with exact accounting",
            f"{bars} Dashed lines are without privacy.",
            exact,
            **about,
        )
    ]
    if paper:
        description = f"{bars} Red in the table: more was spent than claimed."
        drawn.append(chart("Test error with the paper's noise", description, paper, **about))
    rows = []
    for r in run.rows:
        more = (
            r["epsilon"] and r["spent_epsilon"] and r["spent_epsilon"] > r["epsilon"] * (1 + 1e-9)
        )
        spent: object = "no bound"
        if r["spent_epsilon"]:
            spent = shown(r["spent_epsilon"])
        if more:
            spent = tag("b", spent, class_="alarm")
        claimed = "∞"
        if r["epsilon"]:
            claimed = f"{r['epsilon']:g}"
        rows.append(
            (
                curve_name(r["curve"]),
                claimed,
                f"{r['test_error']:.2%}",
                f"{r['standard_error']:.2%}",
                spent,
                ", ".join(f"{k} {v:g}" for k, v in r["settings"].items()),
            )
        )
    columns = (
        "curve",
        "ε claimed",
        "test error",
        "standard error",
        "ε spent",
        "settings chosen by training loss",
    )
    numbers = table("Every point of the figures", columns, rows, numbers=(1, 2, 3, 4))
    return section("error", "Error by epsilon", *drawn, numbers)


def curve(run: Run) -> Markup:
    answered = [r for r in run.rounds if r.get("norm") is not None]
    heading = "How much of each answer is noise"
    if not answered:
        if run.rounds or run.state == "running":
            why = "No question has been answered yet."
        else:
            why = "This folder has no progress.jsonl."
        return section("curve", heading, tag("p", why))
    at = [(r["question"] + 1, r) for r in answered]
    length = chart(
        "Length of the averaged release",
        (
            "The length of what the server receives in each question, and the expected "
            "length of the noise in it. Where both are similar, the release is mostly "
            "noise."
        ),
        [
            Series("release", [(q, r["norm"]) for q, r in at], 0, dots=len(at) < 40),
            Series("noise in it", [(q, r["noise"]) for q, r in at], 1, "dash", area=True),
        ],
        across="question",
        up="norm",
    )
    share = chart(
        "The noise's share of each release",
        (
            "Expected squared length of the noise, divided by the squared length of "
            "the release. The size of the noise follows from the mechanism, not from "
            "the records."
        ),
        [Series("share", [(q + 1, s) for q, s in run.noise_shares], 1, area=True)],
        across="question",
        up="share",
        percent=True,
        top=1.0,
    )
    middle = 0.0
    if run.noise_shares:
        middle = median(s for _, s in run.noise_shares)
    remark = LITTLE
    if middle > 0.5:
        remark = MUCH
    plain = tag(
        "p",
        (
            f"In the median question, noise was {middle:.0%} of what the server received, by "
            f"squared length. This noise is the protection. {remark}"
        ),
    )
    rows = [
        (
            r["question"] + 1,
            r["round"],
            r["kind"],
            f"{r['clip']:.4g}",
            f"{r['norm']:.4g}",
            f"{r['noise']:.4g}",
            f"{noise_share(r):.1%}" if r["norm"] else "",
            f"{len(r['answered'])}",
            ", ".join(f"{n} {c}" for n, c in r["dropped"].items()) or "-",
        )
        for _, r in at
    ]
    columns = (
        "question",
        "round",
        "kind",
        "clip",
        "norm",
        "noise",
        "noise's share",
        "answers",
        "without",
    )
    numbers = table("Every question", columns, rows, numbers=(0, 1, 3, 4, 5, 6, 7))
    note = ""
    if any(r["statistic"] in ("LocalSteps", "SteeredSteps") for r in answered):
        note = tag(
            "p",
            "The noise of local steps is summed as if gradient and constraint left it unchanged.",
            class_="soft small",
        )
    return section(
        "curve",
        heading,
        plain,
        length,
        share,
        note,
        folded("questions", "Every question in numbers", numbers),
    )


# --- 3 and 4: what was not protected, and who has read it ----------------------------------------


def not_protected(run: Run) -> Markup:
    return section(
        "not-protected",
        "What was not protected",
        tag("ul", *(tag("li", sentence(s)) for s in sentences(run)), class_="list"),
    )


def signature(run: Run, when: str) -> Markup:
    heads = [
        (f"Ledger head of {s.name}, entry {s.ledger['count']}", s.ledger["head"])
        for s in run.silos
        if s.ledger
    ]
    pairs = [
        ("Run folder, SHA-256", fingerprint(run.folder)),
        ("Study", run.about.get("study")),
        ("Run", run.about.get("run")),
        ("Approved definition, SHA-256", run.about.get("definition")),
        *heads,
    ]
    rows = [(name, tag("span", value, class_="hash")) for name, value in pairs if value]
    lines = tag(
        "div",
        *(tag("div", name) for name in ("Name and role", "Signature", "Place and date")),
        class_="sign",
    )
    how = (
        "The folder's hash is SHA-256 over the lines that `sha256sum` prints for its "
        "files, sorted by name, without drawings and pages."
    )
    made = tag(
        "p", sentence(f"{how} Made on {when} by silodp {version('silodp')}."), class_="soft small"
    )
    read = tag("p", "I have read what was trained, what it cost and what was not protected.")
    return section(
        "signature",
        "Signed",
        table("What this page is about", ("what", "value"), rows, hide=True),
        made,
        read,
        lines,
    )


def _some(silos: Sequence[Any]) -> str:
    if len(silos) == 1:
        return "1 silo"
    return f"{len(silos)} silos"


def _number(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not (isinstance(value, float) and math.isnan(value)):
        return f"{value:g}"
    return str(text(value))
