"""The commands `compare`, `figures`, `gallery`, `rates` and `coverage`: studies on public data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from silodp.cli.console import Json, dump, progress, say, show, table, tell
from silodp.cli.interrupted import KEPT, interruptible
from silodp.cli.options import Out, Rounds, Settings, positive
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up
from silodp.host import atomic

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Folder of MNIST or CIFAR-10; research/README.md lists both."),
]


def compare(
    data: Annotated[str, typer.Option(help="Data set: wbcd, digits, mnist or cifar10.")] = "wbcd",
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            help="Another algorithm beside them, by name or FILE.py:NAME; may be repeated."
        ),
    ] = None,
    settings: Settings = None,
    rounds: Rounds = 25,
    trials: Annotated[int, typer.Option(help="Random train/test splits.")] = 10,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Privacy levels; the paper's seven by default.")
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden units of the two-layer network.")] = 5,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's whole grid instead of a thinned one.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two trials at three epsilons, to see it work.")
    ] = False,
    data_dir: DataDir = None,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """What privacy costs: test error by epsilon and algorithm, on real patient data.

    The default is the paper's breast-cancer experiment: two hospitals, one holding the malignant
    and one the benign cases. Interrupt it and run it again: it goes on where it stopped.

    Examples: `python -m research compare` · `python -m research compare --quick` · `python -m
    research compare --data digits --rounds 50 --hidden 16` · `python -m research compare
    --algorithm mine.py:heavy_ball`
    """
    from research import compare as lab
    from research.figures import draw_comparison
    from research.study import EPSILONS, demo
    from silodp.server.algorithms import assignments

    for name, value in (("rounds", rounds), ("trials", trials), ("hidden", hidden)):
        positive(name, value)
    epsilons = tuple(
        positive("epsilon", e) for e in epsilon or ((0.75, 3.0, 18.0) if quick else EPSILONS)
    )
    study = replace(
        demo(data, rounds, hidden=hidden, full=full),
        trials=2 if quick else trials,
        epsilons=epsilons,
    )
    study = study.beside(algorithm or (), assignments(settings or ()))
    kind = [
        *(["full"] if full else ["quick"] if quick else []),
        *(name.rpartition(":")[2] for name in algorithm or ()),
    ]
    folder = out_dir or Path("runs") / "-".join(["compare", data, f"R{rounds}", *kind])
    with (
        interruptible(KEPT.format(folder)),
        progress(f"{data}, batches of runs", quiet=as_json) as tick,
    ):
        rows = lab.carry_out({folder: study}, data_dir=data_dir, tick=tick)[folder]
    draw_comparison(
        rows, folder / "figure", title=f"{data}, R = {rounds}, {study.trials} random splits"
    )
    gains = {
        of: {
            over: lab.improvement(rows, over, of)
            for over in ("mb-sgd", "local-sgd", "spider-diff-paper")
        }
        for of in ("spider", "spider-diff")
    }
    if as_json:
        return dump(
            {"rows": rows, "improvement_percent": gains, "note": lab.NOTE, "folder": str(folder)}
        )
    show(*_comparison_tables(rows, epsilons, algorithm or ()))
    tuned = (r for r in rows if r["curve"] == "spider")
    phases = ", ".join(
        "1"
        if r["algorithm"] == "mb-sgd"
        else f"{r['settings']['phase']:g}"
        if r["algorithm"] == "spider"
        else "alternate"
        for r in tuned
    )
    say(
        "SPIDER is tuned over the phases of this study, phase 1 (which is MB-SGD) "
        f"included; training loss chose {phases}."
    )
    say(
        "Average relative difference of SPIDER's test error, tuned over these phases / "
        "over those above 1:"
    )
    paper = {
        "mb-sgd": "MB-SGD (the paper found 1.72 % lower)",
        "local-sgd": "Local SGD (the paper found 6.06 % lower)",
    }
    for over in gains["spider"]:
        both = " / ".join(
            f"{abs(gains[of][over]):.2f} % {'lower' if gains[of][over] >= 0 else 'higher'}"
            for of in gains
        )
        say(f"  {both} than {paper.get(over, 'SPIDER with the noise of the paper (phase > 1)')}")
    say(lab.NOTE)
    say(f"Everything is in {folder}: results.csv, summary.json, figure.png, figure.svg.")


Reduced = Annotated[
    bool,
    typer.Option("--reduced", help="Few trials, epsilons and settings: minutes on two cores."),
]
Trials = Annotated[int | None, typer.Option(help="Random train/test splits.")]
Shard = Annotated[
    str,
    typer.Option(
        help="i/k: this machine's part of the work. The folder collects the results of all parts."
    ),
]
Gpu = Annotated[bool, typer.Option("--gpu/--cpu", help="Whether to use a GPU if there is one.")]


def figures(
    figures: Annotated[
        list[str],
        typer.Argument(
            help=(
                "wbcd, mnist, cifar10, all of the paper's figures, leaderboard, variance, "
                "trust, or figures by name."
            )
        ),
    ],
    reduced: Reduced = False,
    trials: Trials = None,
    shard: Shard = "1/1",
    on: Annotated[
        str,
        typer.Option(
            help="Where: here, or ray, on the cluster at RAY_ADDRESS (pip install 'silodp[ray]')."
        ),
    ] = "here",
    gpu: Gpu = True,
    data_dir: DataDir = None,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """The paper's figures with exact accounting: PNG, SVG, a small table, and a paragraph on what
    it shows.

    Interrupt it and run it again: it goes on where it stopped.

    Examples: `python -m research figures wbcd` · `python -m research figures mnist --reduced
    --data-dir DIR` · `python -m research figures all --shard 1/4 --data-dir DIR`
    """
    if on not in ("here", "ray"):
        raise BadInput(f"--on is {on}; it must be here or ray")
    from research import compare as lab
    from research import study as studies
    from research.figures import draw_comparison
    from research.gallery import reading, title_of

    found = {
        name: study for figure in figures for name, study in studies.studies_by_name(figure).items()
    }
    if reduced:
        found = {f"{name}-reduced": studies.reduced(study) for name, study in found.items()}
    if trials is not None:
        found = {
            name: replace(study, trials=int(positive("trials", trials)))
            for name, study in found.items()
        }
    folder = out_dir or Path("runs") / "reproduce"
    names = ", ".join(dict.fromkeys(study.dataset for study in found.values()))
    with (
        ExitStack() as closing,
        interruptible(KEPT.format(folder)),
        progress(f"{names}, batches of runs", quiet=as_json) as tick,
    ):
        wanted = {folder / name: study for name, study in found.items()}
        cluster = None
        if on == "ray":
            from research.on_ray import Cluster

            cluster = Cluster()
            closing.callback(cluster.close)
        done = lab.carry_out(
            wanted, data_dir=data_dir, tick=tick, shard=_shard(shard), gpu=gpu, cluster=cluster
        )
    shown = []
    for name, study in found.items():
        if rows := done.get(folder / name):
            draw_comparison(
                rows,
                folder / name / "figure",
                title=f"{title_of(study)}, {study.trials} random splits",
            )
            paper = set(studies.PAPER) <= set(study.methods)
            shown.append(
                {
                    "figure": name,
                    "folder": str(folder / name),
                    "reading": reading(rows, study) if paper else "",
                    "rows": rows,
                }
            )
    if as_json:
        return dump({"figures": shown, "note": lab.NOTE})
    for entry in shown:
        say(
            f"{entry['figure']}: {entry['reading']}",
            f"  {entry['folder']}: results.csv, figure.csv, figure.png, figure.svg.",
        )
    if len(shown) < len(found):
        say(
            f"{len(found) - len(shown)} of {len(found)} studies wait for the other shards; "
            "run the command on all of them in one folder."
        )
    say(lab.NOTE)


def verdict(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Data sets, figures and conditions by name; all of them by default."),
    ] = None,
    reduced: Reduced = False,
    trials: Trials = None,
    shard: Shard = "1/1",
    gpu: Gpu = True,
    minutes: Annotated[
        float | None,
        typer.Option(help="Begin no new work after this time. Run the command again to resume."),
    ] = None,
    data_dir: DataDir = None,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """Repeat the paper's experiments with correct noise, and write their trials to verdict.csv.

    Examples: `python -m research verdict --reduced --data-dir DIR` · `python -m research verdict
    wbcd primary text`
    """
    from research.verdict_command import verdict as carry_out

    carry_out(names or [], reduced, trials, _shard(shard), gpu, minutes, data_dir, out_dir, as_json)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise BadInput(f"shard {text!r} is not i/k with 1 <= i <= k, such as 2/8")
    return int(part), int(parts)


def gallery(
    runs: Annotated[
        Path, typer.Option(help="Where `python -m research figures` has put its folders.")
    ] = Path("runs/reproduce"),
    docs: Annotated[
        Path,
        typer.Option(help="Where the pages, and the tables and figures beside them, are kept."),
    ] = Path("docs"),
    as_json: Json = False,
) -> None:
    """Pages of results (figures, leaderboard, where variance reduction helps, what a shuffler buys)
    from the tables of finished studies.

    Takes the tables of studies that are finished in --runs along, and redraws everything from the
    tables in --docs.

    Example: `python -m research gallery`
    """
    from research.gallery import write_gallery
    from research.study import STUDIES

    tables = docs / "figures"
    tables.mkdir(parents=True, exist_ok=True)
    for name in STUDIES:
        if (source := runs / name / "figure.csv").exists():
            atomic.write(tables / f"{name}.csv", source.read_bytes(), mode=0o644, durable=False)
    pages = [str(page) for page in write_gallery(docs, tables)]
    tell({"pages": pages}, as_json, *pages)


def _comparison_tables(
    rows: list[dict[str, Any]], epsilons: tuple[float, ...], own: Sequence[str] = ()
) -> list[Table]:
    """Test errors in per cent: with exact accounting, and with the paper's constants beside what
    they really spend.
    """
    by = {(r["curve"], r["epsilon"]): r for r in rows}

    def cell(curve: str, epsilon: float | None) -> str:
        r = by.get((curve, epsilon))
        if r:
            return f"{100 * r['test_error']:.1f} ± {100 * r['standard_error']:.1f}"
        return ""

    def spends(r: dict[str, Any] | None, claimed: float) -> Text:
        if r:
            shown = rounded_up(r["spent_epsilon"], 2, "f")
        else:
            shown = ""
        return Text(shown, style="red" if r and r["spent_epsilon"] > claimed else "")

    exact = [
        [f"{e:g}", *(cell(c, e) for c in ("spider", "spider-diff", "mb-sgd", "local-sgd", *own))]
        for e in epsilons
    ]
    exact.append(
        [
            "not private",
            "",
            "",
            cell("mb-sgd-open", None),
            cell("local-sgd-open", None),
            *("" for _ in own),
        ]
    )
    curves = ("spider-diff-paper", "mb-sgd-paper", "local-sgd-paper")
    paper = (
        [f"{e:g}", *(word for c in curves for word in (cell(c, e), spends(by.get((c, e)), e)))]
        for e in epsilons
    )
    columns = "|".join(
        [
            "epsilon>|SPIDER>|SPIDER, phase > 1>|MB-SGD>|Local SGD>",
            *(f"{name.rpartition(':')[2]}>" for name in own),
        ]
    )
    title = "Test error in per cent (± standard error), exact accounting"
    styles = [*[None] * len(epsilons), "dim"]
    spent = "The same with the paper's noise constants, and the epsilon that they really spend"
    of_paper = table(
        "claimed>|SPIDER, phase > 1>|spends>|MB-SGD>|spends>|Local SGD>|spends>", paper, title=spent
    )
    return [table(columns, exact, title=title, styles=styles), of_paper]


def rates(out_dir: Out = None, as_json: Json = False) -> None:
    """The theorems as slopes, of ISRL-DP and of SDP: excess risk and gradient-mapping norm against
    epsilon, n, N and d, beside the theory's.

    Each point runs the schedule and noise of its theorem on a problem whose constants are known. A
    table, a figure, and every point.

    Example: `python -m research rates`
    """
    from research.figures import draw_rates
    from research.rates import measure
    from silodp.simulation.runfolder import unused

    folder = unused(out_dir, Path("runs") / "rates", "rates.json")
    with (
        interruptible("nothing is kept, since the whole study takes a few minutes"),
        progress("rates", quiet=as_json) as tick,
    ):
        fits = measure(folder, tick=tick)
    draw_rates(fits, folder)
    if as_json:
        return dump({"fits": fits, "folder": str(folder)})
    rows = (
        (
            fit["theorem"],
            fit["algorithm"],
            fit["against"],
            f"{fit['slope']:+.2f}",
            f"{fit['slope_error']:.2f}",
            f"{fit['theory']:+.2f}",
            f"{fit['as_run']:+.2f}",
            fit["verdict"],
        )
        for fit in fits
    )
    title = "Log-log slopes: excess risk, and of SPIDER the squared gradient mapping"
    show(
        table("theorem|algorithm|against|slope>|± s.e.>|theory>|as run>|verdict", rows, title=title)
    )
    say(
        "as run: the slope of the proof's own terms at the R, K, q, S and noise that ran; "
        "flatter, steeper: than either."
    )
    regimes = (
        (
            fit["theorem"],
            f"{x:g}",
            f"{r['X']:.0f}",
            r["phase"],
            r["rounds"],
            f"{r['carried']:.2f}",
            f"{p['value']:.3g}",
        )
        for fit in fits
        if fit["against"] == "epsilon"
        for x, r, p in zip(fit["x"], fit["regime"], fit["points"], strict=False)
    )
    title = "Where SPIDER's 4/3 is to be seen: once phases carry all noise"
    show(
        table("theorem|epsilon>|X>|phase q>|rounds R>|noise carried>|value>", regimes, title=title)
    )
    say(
        f"Everything is in {folder}: rates.csv, rates.json, rates.png, rates.svg, "
        "regime.png, regime.svg."
    )


def coverage(
    replications: Annotated[int, typer.Option(help="Data sets drawn for each design.")] = 2000,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="The intervals of `silodp evaluate` instead.")
    ] = False,
    as_json: Json = False,
) -> None:
    """How often the intervals of `silodp stats estimate` hold the truth, over models that are
    known, privacy noise included.

    Linear designs in which no record is scaled down come first; where the clip or the noise bites,
    the share is printed and not called 95 %. Logistic, Poisson and Cox models follow.

    Example: `python -m research coverage --replications 200` · `python -m research coverage
    --evaluation`
    """
    from research.coverage import measure, measure_columns, measure_ratios

    replications = int(positive("replications", replications))
    if evaluation:
        return _evaluation_coverage(replications, as_json)
    found = list(measure(replications))
    columns = list(measure_columns(replications))
    ratios = list(measure_ratios(replications))
    if as_json:
        return dump({"designs": found, "columns": columns, "ratios": ratios})
    rows = (
        (
            row["features"],
            sum(row["records"]),
            f"{row['epsilon']:g}",
            "no" if row["clip_inactive"] else f"clip {row['clip']:g}",
            f"{row['least']:.1%}",
            f"{row['mean']:.1%}",
            f"{row['largest']:.1%}",
            f"{row['half_width']:.3g}",
            "yes" if row["called_95"] else "no",
        )
        for row in found
    )
    title = f"Share of intervals that hold a coefficient, {replications:,} replications"
    show(table("columns>|records>|epsilon>|scaled|least>|mean>|most>|+->|95 %", rows, title=title))
    say(
        "scaled: whether long records are, by the clip. least, most: over the coefficients of "
        "a design. A share has a standard error of about "
        f"{found[0]['standard_error']:.1%}; noise that hides the features gives no interval, "
        "which counts as none that holds."
    )
    _show_ratios(ratios)
    _show_columns(columns)


def _show_columns(found: Sequence[Mapping[str, Any]]) -> None:
    """Print how often the intervals of columns hold the truth."""
    names = list(found[0]["covered"])
    rows = []
    for row in found:
        about = (row["law"], row["records"], f"{row['epsilon']:g}", row["trust"], row["bins"])
        shares = [*row["covered"].values(), row["profile_mean"], row["profile_missing"]]
        rows.append((*about, *(f"{share:.1%}" for share in shares)))
    head = "|".join(f"{name}>" for name in [*names, "profile mean", "missing"])
    title = f"Share of columns' intervals that hold the truth, {found[0]['replications']:,} times"
    show(table(f"values|records>|epsilon>|trust|bins>|{head}", rows, title=title))


def _evaluation_coverage(replications: int, as_json: bool) -> None:
    """Print the coverage of the intervals of `silodp evaluate`."""
    from research.evaluation import measure, summary

    found = list(measure(replications))
    if as_json:
        return dump({"rows": found})
    rows = (
        (
            row["kind"],
            row["figure"],
            str(row["designs"]),
            f"{row['least']:.1%}",
            f"{row['shown_least']:.1%}",
            f"{row['shown_largest']:.1%}",
        )
        for row in summary(found)
    )
    title = f"Share of intervals that contain the truth, {replications:,} replications"
    columns = "label|figure|designs>|least>|least, with a value>|largest, with a value>"
    show(table(columns, rows, title=title))
    say(
        "A design is a population, a number of records and an epsilon. The last two columns are of "
        "designs in which at least half of the evaluations give the figure a value. Other "
        "intervals are wide, and nearly always contain the truth."
    )


def _show_ratios(ratios: Sequence[Mapping[str, Any]]) -> None:
    """Print how often the intervals of logistic, Poisson and Cox models hold the truth."""
    lines = (
        (
            row["model"],
            row["features"],
            row["records"],
            f"{row['epsilon']:g} {row['trust']}",
            f"{row['events']:g}",
            f"{row['lost']:g}",
            f"{row['least']:.1%}",
            f"{row['largest']:.1%}",
            f"{row['noise_share']:.0%}",
            row["without_interval"],
        )
        for row in ratios
    )
    headings = "model|columns>|records>|epsilon>|events>|lost>|least>|most>|noise>|none>"
    show(table(headings, lines, title="Ratios: logistic, Poisson and Cox models"))
    say(
        "events: the share with the event, or the mean count; lost: the share of records that is "
        "lost to follow-up; noise: the part of a standard error that is privacy noise; none: data "
        "sets without an interval, which do not count."
    )


def synthetic(
    table: Annotated[
        list[str] | None, typer.Option(help="A table by name; may be repeated. Five by default.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="What each silo pays.")] = 3.0,
    seeds: Annotated[int, typer.Option(help="Splits of the records, each with a noise.")] = 5,
    trust: Annotated[str, typer.Option(help="isrl, masks or shuffle.")] = "isrl",
    six: Annotated[
        bool, typer.Option("--six", help="Six silos under masks beside one of all their records.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Six tables on which no setting was chosen.")
    ] = False,
) -> None:
    """Models from synthetic tables beside direct training at the same price.

    Examples: `python -m research synthetic` · `python -m research synthetic --six` ·
    `python -m research synthetic --fresh`
    """
    from research import synthetic as lab

    positive("--seeds", seeds)
    positive("--epsilon", epsilon)
    for name in table or ():
        if name not in lab.STUDIES:
            raise BadInput(f"the table is {name!r}; use one of {', '.join(lab.STUDIES)}")
    if six:
        found = lab.six_silos(epsilon, range(seeds))
    else:
        usual = tuple(lab.FRESH) if fresh else lab.TABLES
        found = lab.measure(table or usual, epsilon, range(seeds), trust)
    for row in found:
        print(
            row["table"] + ": " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "table"),
            flush=True,
        )


def ratios(
    data_dir: Annotated[
        Path, typer.Option(help="Folder of the tables that are files: hospitals/tcga_brca.")
    ] = Path("data"),
    table: Annotated[
        list[str] | None, typer.Option(help="A table by name; may be repeated. All by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Draws of the noise.")] = 5,
) -> None:
    """Odds, rate and hazard ratios beside lifelines and statsmodels: the table of
    docs/regression.md.

    Example: `pip install -r research/ratios-requirements.txt` and then `python -m research ratios
    --data-dir data`
    """
    from research import ratios as lab

    positive("--seeds", seeds)
    for name in table or ():
        if name not in lab.STUDIES:
            raise BadInput(f"the table is {name!r}; use one of {', '.join(lab.STUDIES)}")
    for line in lab.table(table or tuple(lab.STUDIES), data_dir, seeds):
        print(line, flush=True)


def one_shot(
    seeds: Annotated[int, typer.Option(help="Draws of records and noise, for each shape.")] = 1000,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    as_json: Json = False,
) -> None:
    """Whether a one-shot model is ever worse than a constant, on ten shapes of made-up records.

    Example: `python -m research one-shot --seeds 100`
    """
    from research.one_shot import WORSE, measure

    positive("--seeds", seeds)
    found = []
    positive("--workers", workers)
    for row in measure(seeds, workers):
        found.append(row)
        if not as_json:
            say("  ".join(f"{name} {value}" for name, value in row.items()))
    if as_json:
        dump({"rows": found, "worse": WORSE})
