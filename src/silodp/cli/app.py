"""The command line. Bad input gets one sentence and exit code 2, an interrupt one and 130; every command has --json for machines."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click
import typer
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from silodp.cli import choose
from silodp.cli.audit import audit
from silodp.cli.doctor import doctor
from silodp.cli.federation import federation
from silodp.cli.interrupted import interruptible
from silodp.cli.ledger import ledger
from silodp.cli.pages import report, ui
from silodp.cli.project import Project, init
from silodp.cli.score import evaluate, profile
from silodp.cli.shuffler import shuffler
from silodp.cli.silo import silo as silo_commands
from silodp.core.errors import BadInput, Refused

app = typer.Typer(
    help="Federated learning for people who do not trust the server: every silo's messages are differentially private for each record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(ledger, name="ledger")
app.add_typer(silo_commands, name="silo")
app.add_typer(federation, name="federation")
app.add_typer(shuffler, name="shuffler")
app.command()(audit)
app.command()(choose.tune)
app.command()(doctor)
app.command()(init)
app.command()(evaluate)
app.command()(profile)
app.command()(report)
app.command()(ui)
out = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; by default under runs/.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where MNIST or CIFAR-10 lie; `silodp data` says how to get them.")]
AlgorithmName = Annotated[
    str,
    typer.Option(
        "--algorithm",
        help="prox-sgd, mb-sgd, local-sgd, prox-svrg, prox-pl-svrg, spider, spider-alternate, diff2, scaffold, momentum, adam, disk.",
    ),
]
Rounds = Annotated[int, typer.Option(help="Communication rounds R.")]
Phase = Annotated[int, typer.Option(help="Phase q of spider and diff2: a fresh anchor every q rounds.")]
Clip = Annotated[float, typer.Option(help="Clip threshold L: each record's whole gradient is clipped to this norm.")]
Slope = Annotated[float, typer.Option(help="Differences are clipped at slope x the move of w (at most 2 L); inf: at 2 L alone.")]
LocalSteps = Annotated[int, typer.Option(help="Noisy local steps a round, for local-sgd and scaffold.")]
Inner = Annotated[int, typer.Option(help="Inner steps of an SVRG epoch.")]
Momentum = Annotated[float, typer.Option(help="Of momentum, and beta_1 of adam.")]
Kappa = Annotated[float, typer.Option(help="Gain of disk's filter: the weight of a new gradient; 1 is mb-sgd.")]
Restarts = Annotated[int, typer.Option(help="Restarts of prox-pl-svrg.")]
SamplingName = Annotated[str | None, typer.Option("--sampling", help="full, disjoint, poisson:RATE or without-replacement:RATE.")]
Participation = Annotated[str, typer.Option(help="Who answers a round: all, uniform:M, random:M or balanced:M.")]
RuleName = Annotated[str | None, typer.Option("--rule", help="Ledger rule: gdp, renyi or committed; the tightest that applies by default.")]
AnchorShare = Annotated[float | None, typer.Option(help="Share of the budget that anchors take; differences get the rest.")]
Seed = Annotated[int, typer.Option(help="Public coins: which silos answer.")]


def main() -> None:
    """Entry point: turns what a user may have got wrong into one sentence and exit code 2."""
    try:
        app()
    except BadInput as error:
        print(f"silodp: {error}", file=sys.stderr)
        sys.exit(2)
    except Refused as refusal:
        print(f"silodp: the gate refused ({refusal.code})", file=sys.stderr)
        sys.exit(2)


def positive(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise BadInput(f"{name} is {value:g}; it must be greater than 0")
    return value


@app.command()
def compare(
    data: Annotated[str, typer.Option(help="Data set: wbcd, digits, mnist or cifar10.")] = "wbcd",
    rounds: Rounds = 25,
    trials: Annotated[int, typer.Option(help="Random train/test splits.")] = 10,
    epsilon: Annotated[list[float] | None, typer.Option(help="Privacy levels; the paper's seven by default.")] = None,
    hidden: Annotated[int, typer.Option(help="Hidden units of the two-layer network.")] = 5,
    full: Annotated[bool, typer.Option("--full", help="The paper's whole grid instead of a thinned one.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Two trials at three epsilons, to see it work.")] = False,
    data_dir: DataDir = None,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """What privacy costs: test error by epsilon and algorithm, on real patient data.

    The default is the paper's breast-cancer experiment: two hospitals, one holding the malignant and one the benign cases.
    Interrupt it and run it again: it goes on where it stopped.

    Examples: `silodp compare` · `silodp compare --quick` · `silodp compare --data digits --rounds 50 --hidden 16`
    """
    from silodp.lab.studies import compare as lab
    from silodp.lab.studies.figures import draw_comparison
    from silodp.lab.studies.study import EPSILONS, demo

    for name, value in (("rounds", rounds), ("trials", trials), ("hidden", hidden)):
        positive(name, value)
    epsilons = tuple(positive("epsilon", e) for e in epsilon or ((0.75, 3.0, 18.0) if quick else EPSILONS))
    study = replace(demo(data, rounds, hidden=hidden, full=full), trials=2 if quick else trials, epsilons=epsilons)
    folder = out_dir or Path("runs") / "-".join(["compare", data, f"R{rounds}", *(["full"] if full else ["quick"] if quick else [])])
    with interruptible(choose.KEPT.format(folder)):
        rows = lab.carry_out({folder: study}, data_dir=data_dir, quiet=as_json)[folder]
    draw_comparison(rows, folder / "figure", title=f"{data}, R = {rounds}, {study.trials} random splits")
    gains = {
        of: {over: lab.improvement(rows, over, of) for over in ("mb-sgd", "local-sgd", "spider-diff-paper")}
        for of in ("spider", "spider-diff")
    }
    if as_json:
        print(json.dumps({"rows": rows, "improvement_percent": gains, "note": lab.NOTE, "folder": str(folder)}))
        return
    for table in _comparison_tables(rows, epsilons):
        out.print(table)
    tuned = (r for r in rows if r["curve"] == "spider")
    phases = ", ".join(
        "1" if r["algorithm"] == "mb-sgd" else f"{r['settings']['phase']:g}" if r["algorithm"] == "spider" else "alternate" for r in tuned
    )
    out.print(f"SPIDER is tuned over the phases of this study, phase 1 (which is MB-SGD) included; training loss chose {phases}.")
    out.print("Average relative difference of SPIDER's test error, tuned over these phases / over those above 1:")
    paper = {"mb-sgd": "MB-SGD (the paper found 1.72 % lower)", "local-sgd": "Local SGD (the paper found 6.06 % lower)"}
    for over in gains["spider"]:
        both = " / ".join(_lower(gains[of][over]) for of in gains)
        out.print(f"  {both} than {paper.get(over, 'SPIDER with the noise of the paper (phase > 1)')}")
    out.print(lab.NOTE)
    out.print(f"Everything is in {folder}: results.csv, summary.json, figure.png, figure.svg.")


@app.command()
def reproduce(
    figures: Annotated[
        list[str],
        typer.Argument(help="wbcd, mnist, cifar10, all of the paper's figures, leaderboard, variance, trust, or figures by name."),
    ],
    reduced: Annotated[bool, typer.Option("--reduced", help="Few trials, epsilons and settings: minutes on two cores.")] = False,
    trials: Annotated[int | None, typer.Option(help="Random train/test splits.")] = None,
    shard: Annotated[
        str, typer.Option(help="i/k: this machine's part of the work; the folder's results are the union of all parts.")
    ] = "1/1",
    gpu: Annotated[bool, typer.Option("--gpu/--cpu", help="Whether to use a GPU if there is one.")] = True,
    data_dir: DataDir = None,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """The paper's figures with exact accounting: PNG, SVG, a small table, and a paragraph on what it shows.

    Interrupt it and run it again: it goes on where it stopped.

    Examples: `silodp reproduce wbcd` · `silodp reproduce mnist --reduced --data-dir DIR` · `silodp reproduce all --shard 1/4 --data-dir DIR`
    """
    from silodp.lab.studies import compare as lab
    from silodp.lab.studies import study as studies
    from silodp.lab.studies.figures import draw_comparison
    from silodp.lab.studies.gallery import reading, title_of

    found = {name: study for figure in figures for name, study in studies.studies_by_name(figure).items()}
    if reduced:
        found = {f"{name}-reduced": studies.reduced(study) for name, study in found.items()}
    if trials is not None:
        found = {name: replace(study, trials=int(positive("trials", trials))) for name, study in found.items()}
    folder = out_dir or Path("runs") / "reproduce"
    with interruptible(choose.KEPT.format(folder)):
        done = lab.carry_out(
            {folder / name: study for name, study in found.items()}, data_dir=data_dir, quiet=as_json, shard=_shard(shard), gpu=gpu
        )
    shown = []
    for name, study in found.items():
        if rows := done.get(folder / name):
            draw_comparison(rows, folder / name / "figure", title=f"{title_of(study)}, {study.trials} random splits")
            paper = set(studies.PAPER) <= set(study.methods)
            shown.append({"figure": name, "folder": str(folder / name), "reading": reading(rows, study) if paper else "", "rows": rows})
    if as_json:
        print(json.dumps({"figures": shown, "note": lab.NOTE}))
        return
    for entry in shown:
        out.print(f"{entry['figure']}: {entry['reading']}\n  {entry['folder']}: results.csv, figure.csv, figure.png, figure.svg.")
    if len(shown) < len(found):
        out.print(
            f"{len(found) - len(shown)} of {len(found)} studies wait for the other shards; run the command on all of them in one folder."
        )
    out.print(lab.NOTE)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise BadInput(f"shard {text!r} is not i/k with 1 <= i <= k, such as 2/8")
    return int(part), int(parts)


@app.command()
def gallery(
    runs: Annotated[Path, typer.Option(help="Where `silodp reproduce` has put its folders.")] = Path("runs/reproduce"),
    docs: Annotated[Path, typer.Option(help="Where the pages, and the tables and figures beside them, are kept.")] = Path("docs"),
) -> None:
    """Pages of results (figures, leaderboard, where variance reduction helps, what a shuffler buys) from the tables of finished studies.

    Takes the tables of studies that are finished in --runs along, and redraws everything from the tables in --docs.

    Example: `silodp gallery`
    """
    from silodp.lab.studies.gallery import write_gallery
    from silodp.lab.studies.study import STUDIES

    tables = docs / "figures"
    tables.mkdir(parents=True, exist_ok=True)
    for name in STUDIES:
        if (source := runs / name / "figure.csv").exists():
            (tables / f"{name}.csv").write_bytes(source.read_bytes())
    for page in write_gallery(docs, tables):
        out.print(f"{page}")


def _lower(percent: float) -> str:
    return f"{abs(percent):.2f} % {'lower' if percent >= 0 else 'higher'}"


def _comparison_tables(rows: list[dict], epsilons: tuple[float, ...]) -> list[Table]:
    """Test errors in per cent: with exact accounting, and with the paper's constants beside what they really spend."""
    from silodp.core.privacy.accounting import rounded_up

    by = {(r["curve"], r["epsilon"]): r for r in rows}

    def cell(curve: str, epsilon: float | None) -> str:
        r = by.get((curve, epsilon))
        return f"{100 * r['test_error']:.1f} ± {100 * r['standard_error']:.1f}" if r else ""

    def spends(r: dict | None, claimed: float) -> str:
        shown = rounded_up(r["spent_epsilon"], 2, "f") if r else ""
        return f"[red]{shown}[/red]" if r and r["spent_epsilon"] > claimed else shown

    exact = Table(title="Test error in per cent (± standard error), exact accounting")
    for column in ("epsilon", "SPIDER", "SPIDER, phase > 1", "MB-SGD", "Local SGD"):
        exact.add_column(column, justify="right")
    for e in epsilons:
        exact.add_row(f"{e:g}", *(cell(c, e) for c in ("spider", "spider-diff", "mb-sgd", "local-sgd")))
    exact.add_row("not private", "", "", cell("mb-sgd-open", None), cell("local-sgd-open", None), style="dim")
    paper = Table(title="The same with the paper's noise constants, and the epsilon that they really spend")
    for column in ("claimed", "SPIDER, phase > 1", "spends", "MB-SGD", "spends", "Local SGD", "spends"):
        paper.add_column(column, justify="right")
    for e in epsilons:
        cells = [(cell(c, e), by.get((c, e))) for c in ("spider-diff-paper", "mb-sgd-paper", "local-sgd-paper")]
        paper.add_row(f"{e:g}", *(word for text, r in cells for word in (text, spends(r, e))))
    return [exact, paper]


@app.command()
def plan(
    algorithm: AlgorithmName = "spider",
    records: Annotated[list[int] | None, typer.Option(help="Records in a silo; once for each silo.")] = None,
    silos: Annotated[int | None, typer.Option(help="Number of silos, if all have the --records given once.")] = None,
    trust: Annotated[str, typer.Option(help="Who is trusted: isrl (nobody), shuffle (a shuffler) or central (the server).")] = "isrl",
    least: Annotated[
        int | None, typer.Option(help="Fewest silos of a round that is released, with --trust shuffle; all by default.")
    ] = None,
    rounds: Rounds = 25,
    phase: Phase = 5,
    epsilon: Annotated[float, typer.Option(help="Epsilon of every silo.")] = 3.0,
    delta: Annotated[float | None, typer.Option(help="Delta; 1/n^2 by default.")] = None,
    clip: Clip = 1.0,
    slope: Slope = 1.0,
    local_steps: LocalSteps = 2,
    inner: Inner = 5,
    restarts: Restarts = 2,
    momentum: Momentum = 0.9,
    kappa: Kappa = 0.7,
    sampling: SamplingName = None,
    participation: Participation = "all",
    rule: RuleName = None,
    anchor_share: AnchorShare = None,
    noise: Annotated[str, typer.Option(help="exact, or paper: the paper's constants and what they really spend.")] = "exact",
    user_level: Annotated[bool, typer.Option("--user-level", help="epsilon and delta are for a whole silo, not for a record.")] = False,
    lipschitz: Annotated[float | None, typer.Option(help="L, for the theory.")] = None,
    smoothness: Annotated[float | None, typer.Option(help="beta, for the theory.")] = None,
    pl: Annotated[float | None, typer.Option(help="mu, the proximal-PL constant, for the theory.")] = None,
    gap: Annotated[float | None, typer.Option(help="Delta >= F(w_0) - F*, for the theory.")] = None,
    dimension: Annotated[int | None, typer.Option(help="d, number of parameters, for --trust shuffle and the theory.")] = None,
    advise: choose.Advise = False,
    model: Annotated[
        str | None, typer.Option(help="linear, logistic or mlp:HIDDEN, to state the memory that a simulation takes, or for --advise.")
    ] = None,
    features: Annotated[int | None, typer.Option(help="Columns of a record, for --model and --advise.")] = None,
    classes: Annotated[int, typer.Option(help="Classes of the label, for --model and --advise; 0 for a number.")] = 2,
    signal: choose.Signal = "typical",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Before any data is touched: every kind of release, its noise, and what is spent in total.

    Examples: `silodp plan --algorithm mb-sgd --records 1234 --rounds 50 --epsilon 3` ·
    `silodp plan --records 500 --records 2000 --phase 5` · `silodp plan --noise paper --epsilon 18 --json` ·
    `silodp plan --trust shuffle --silos 25 --records 1238 --dimension 3394 --algorithm mb-sgd --rounds 50` ·
    `silodp plan --advise --silos 10 --records 1000 --features 20 --epsilon 1`
    """
    from silodp.core.figures import shown
    from silodp.core.privacy.accounting import rounded_up

    if advise:
        every = _all_records(records or [1000], silos)
        return choose.advise(every, features, classes, model or "logistic", epsilon, delta, signal, as_json=as_json)
    from silodp.lab.planning import Wish
    from silodp.lab.planning_shuffle import planned_for

    wish = Wish(
        algorithm=algorithm, records=_all_records(records or [1000], silos), epsilon=epsilon, delta=delta, clip=positive("clip", clip), noise=noise,
        sampling=sampling, participation=participation, rule=rule, anchor_share=anchor_share, user_level=user_level, seed=seed,
        schedule={
            "rounds": rounds, "phase": phase, "local_steps": local_steps, "inner": inner, "restarts": restarts, "slope": slope,
            "momentum": momentum, "kappa": kappa,
        },
        theory={"lipschitz": lipschitz, "smoothness": smoothness, "pl": pl, "gap": gap, "dimension": dimension},
    )  # fmt: skip
    answer = planned_for(trust, wish, least=least)
    if model:
        from silodp.lab.memory import stated

        answer["peak_memory_bytes"] = stated(model, features, classes, wish.records, algorithm)
    if as_json:
        print(json.dumps(answer))
        return
    if trust == "shuffle":
        _show_shuffle(answer, algorithm)
        if len(set(wish.records)) > 1:
            out.print("Silos differ in size: the shuffled mean is over records, that under ISRL-DP over silos.")
        return
    for silo in answer["silos"]:
        budget = f"epsilon {rounded_up(silo['epsilon'], 6)}, delta {rounded_up(silo['delta'])}"
        table = Table(title=f"A silo of {silo['records']} records: {algorithm}, {budget}")
        for column in ("release", "count", "sensitivity", "noise std", "noise multiplier"):
            table.add_column(column, justify="left" if column == "release" else "right")
        for r in silo["releases"]:
            table.add_row(r["kind"], str(r["count"]), f"{r['sensitivity']:.5g}", f"{r['noise_std']:.5g}", f"{r['noise_multiplier']:.5g}")
        out.print(table)
        out.print(f"Spends epsilon {shown(silo['spent_epsilon'])} in all ({answer['rule']} rule); {_trade_off(silo['mu'])}.")
    if "refine" in {r["kind"] for r in answer["releases"]}:
        out.print("Differences are listed at their largest clip, 2 L; their noise shrinks with the move of w at the same price.")
    if model:
        out.print(f"A simulation in one process takes {answer['peak_memory_bytes'] / 2**20:.0f} MiB of memory at its peak.")
    if "theory" in answer:
        out.print_json(data=answer["theory"])


def _trade_off(mu: float | None) -> str:
    """What else than epsilon at this delta is known of the whole run."""
    from silodp.core.figures import NO_MU, shown

    return f"mu = {shown(mu)}" if mu is not None else NO_MU


def _all_records(records: list[int], silos: int | None) -> tuple[int, ...]:
    if silos is None:
        return tuple(records)
    if silos < 1 or len(records) > 1:
        raise BadInput(
            f"silos is {silos} with {len(records)} --records; give --silos, 1 or more, with --records once, or --records for each"
        )
    return tuple(records) * silos


def _show_shuffle(answer: dict, algorithm: str) -> None:
    """Numerically accounted and proven parameters side by side, for each kind of release."""
    from silodp.core.figures import shown
    from silodp.core.privacy.accounting import rounded_up

    kinds = [("", answer)] if "differences" not in answer else [(", anchors", answer), (", differences", answer["differences"])]
    for name, kind in kinds:
        accounted, proven, bits, noise = kind["parameters"], kind["proven"], kind["bits_per_silo_round"], kind["noise_std"]
        table = Table(title=f"Shuffle: {algorithm}{name}")
        for column in ("", "accounted", "proven"):
            table.add_column(column, justify="right" if column else "left")
        table.add_row("levels g", f"{accounted['levels']}", f"{proven['levels']}")
        table.add_row("noise bits b a record and coordinate", f"{accounted['noise_bits']}", f"{proven['noise_bits']}")
        table.add_row("p", f"{accounted['p']:g}", f"{proven['p']:g}")
        for encoding in ("literal", "counts"):
            table.add_row(f"bits a silo and round, {encoding}", f"{bits[encoding]}", f"{proven['bits_per_silo_round'][encoding]}")
        table.add_row("noise std of the mean", f"{noise['shuffle']:.5g}", f"{proven['noise_std']:.5g}")
        table.add_row("  under ISRL-DP", f"{noise['isrl']:.5g}", "")
        table.add_row("  under central DP", f"{noise['central']:.5g}", "")
        out.print(table)
        out.print(f"g / sqrt(d) = {accounted['levels_per_sqrt_d']:.3g}.")
    server, shuffler = answer["epsilon"]["server"], answer["epsilon"]["shuffler"]
    local = "no bounded epsilon" if shuffler is None else shown(shuffler)
    out.print(
        f"Spends epsilon {shown(server)} at delta {rounded_up(answer['delta'])} against the server, and {local} against the shuffler itself "
        "(at the smallest silo), which no gate can verify."
    )
    if "differences" in answer:
        out.print("Differences are listed at their largest clip, 2 L; their noise shrinks with the move of w at the same price.")
    if "theory" in answer:
        out.print_json(data=answer["theory"])


@app.command()
def train(
    project: Project = None,
    data: Annotated[str | None, typer.Option(help="A built-in data set, instead of files.")] = None,
    silo: Annotated[list[Path] | None, typer.Option(help="One CSV, Parquet or NPZ file, or folder of images, for each silo.")] = None,
    schema: Annotated[Path | None, typer.Option(help="The public schema of the silos' files, in TOML; `silodp init` drafts one.")] = None,
    test: Annotated[Path | None, typer.Option(help="A file, with --schema, to score on in the clear: for research only.")] = None,
    label: Annotated[str, typer.Option(help="Column that holds the label.")] = "label",
    classes: Annotated[str | None, typer.Option(help="Public list of classes, such as benign,malignant; 'number' for regression.")] = None,
    algorithm: AlgorithmName = "spider",
    model: Annotated[str, typer.Option(help="linear, logistic, mlp:HIDDEN, cnn, or FILE.py:FUNCTION for your own torch module.")] = "mlp:8",
    prox: Annotated[str, typer.Option(help="Penalty or constraint: zero, l1:0.01, squared-l2:0.1, l2-ball:5, box:0:1, ...")] = "zero",
    epsilon: Annotated[list[str] | None, typer.Option(help="Budget: a number, or NAME=NUMBER for one silo; may be repeated.")] = None,
    delta: Annotated[list[str] | None, typer.Option(help="As epsilon; 1/n^2 of each silo by default.")] = None,
    rounds: Rounds = 25,
    phase: Phase = 5,
    step: Annotated[float, typer.Option(help="Step size.")] = 0.5,
    clip: Clip = 1.0,
    slope: Slope = 1.0,
    local_steps: LocalSteps = 2,
    inner: Inner = 5,
    restarts: Restarts = 2,
    momentum: Momentum = 0.9,
    kappa: Kappa = 0.7,
    sampling: SamplingName = None,
    participation: Participation = "all",
    rule: RuleName = None,
    anchor_share: AnchorShare = None,
    scale: Annotated[
        str, typer.Option(help="Feature scaling: private (learnt within the budget), none, or a file of public ranges.")
    ] = "private",
    output_rule: Annotated[str, typer.Option("--output", help="last, random (the paper's rule) or tail.")] = "last",
    user_level: Annotated[bool, typer.Option("--user-level", help="Budgets are for a whole silo, not for a record.")] = False,
    seed: Annotated[int | None, typer.Option(help="Fixes all randomness: for research only, since known noise protects nobody.")] = None,
    held_out: Annotated[
        float, typer.Option(help="Share of each silo's records kept out of training, by position: do not sort rows by a value.")
    ] = 0.0,
    data_dir: DataDir = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run folder, without a run in it; a new one in runs/ by default.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the interrupted run in --out, or with the latest one; its settings are its own.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Start another run although the last one was interrupted.")] = False,
    as_json: Json = False,
) -> None:
    """One private run in simulation: a model, the transcript of releases, and what each silo has spent.

    All silos are in this process; `silodp federation` gives each one of its own. The folder --out gets model.safetensors, transcript.jsonl
    and .safetensors (every release), spent.json and environment.json. Each record's guarantee is over the whole run, scaling included.
    Interrupted or killed, it is computed again by --resume with the noise that it had, which is kept until its end: it says nothing new.
    Only the very same run is: same records, model file, settings, versions and threads. A model FILE.py that imports files of its own is not
    resumed; start its run anew with --new.

    Examples: `silodp train --data wbcd --epsilon 3` ·
    `silodp train --silo a.csv --silo b.csv --label outcome --epsilon 2 --epsilon b=1 --model logistic`
    """
    from silodp.core.figures import shown
    from silodp.core.privacy.accounting import rounded_up
    from silodp.lab.runfolder import folder_for, folder_to_resume
    from silodp.lab.training import Request, request_to_resume, run_request

    if resume and new:
        raise BadInput("--resume goes on with a run and --new starts another; give one of them")
    first = Path("runs") / "train"
    folder = folder_to_resume(out_dir, first) if resume else folder_for(out_dir, first, new=new)
    request = Request(
        data=data, silos=tuple(silo or ()), label=label, classes=classes, algorithm=algorithm, model=model, prox=prox,
        epsilon=tuple(epsilon or ("3",)), delta=tuple(delta or ()), step=positive("step", step), clip=positive("clip", clip),
        sampling=sampling, participation=participation, rule=rule, anchor_share=anchor_share, scale=scale, output_rule=output_rule,
        user_level=user_level, seed=seed, data_dir=data_dir, folder=folder, held_out=held_out,
        schema=schema, test=test,
        schedule={
            "rounds": rounds, "phase": phase, "local_steps": local_steps, "inner": inner, "restarts": restarts, "slope": slope,
            "momentum": momentum, "kappa": kappa,
        },
    )  # fmt: skip
    if resume:
        request = request_to_resume(folder, request, _typed())
    if not as_json and not resume and not out_dir and folder != first:
        out.print(f"{first} holds a run already; this one goes to {folder}.")
    with interruptible(lambda: _train_kept(folder)):
        summary = run_request(request, quiet=as_json, resume=resume)
    if as_json:
        print(json.dumps(summary))
        return
    table = Table(title=f"{summary['algorithm']}: {summary['parameters']} parameters")
    for column in ("silo", "epsilon", "delta", "spent"):
        table.add_column(column, justify="left" if column == "silo" else "right")
    for s in summary["silos"]:
        table.add_row(s["name"], f"{s['epsilon']:g}", rounded_up(s["delta"]), shown(s["spent_epsilon"]))
    out.print(table)
    out.print(f"{summary['questions']} questions, {summary['answers']} answers of silos.")
    score = {"test_error": "test error", "balanced_accuracy": "balanced accuracy", "test_loss": "test loss"}
    if told := [f"{words} {summary[name]:.3f}" for name, words in score.items() if name in summary]:
        out.print(f"{', '.join(told).capitalize()} on test records (looked at raw data: a research figure, not private).")
    if summary["note"]:
        out.print(summary["note"])
    out.print(f"Model: {summary['model']}")


def _typed() -> set[str]:
    """Names of the options that were given on the command line itself."""
    context = click.get_current_context()
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def _train_kept(folder: Path) -> str:
    from silodp.lab.runfolder import state_of

    if state_of(folder) == "finished":
        return f"the run had come to its end, and is in {folder}"
    if not state_of(folder):
        return "nothing had been asked yet, and nothing was spent"
    return f"the run is kept in {folder}, and `silodp train --resume --out {folder}` goes on with it without a second price"


@app.command()
def data(as_json: Json = False) -> None:
    """The built-in data sets, and how to get those that are not embedded.

    Example: `silodp data`
    """
    from silodp.silo.data.datasets import DATASETS

    rows = [
        {"name": d.name, "title": d.title, "records": d.records, "silos": d.silos, "embedded": d.embedded, "how_to_get": d.how_to_get}
        for d in DATASETS.values()
    ]
    if as_json:
        print(json.dumps({"datasets": rows}))
        return
    table = Table()
    for column in ("name", "what", "records", "silos", "how to get it"):
        table.add_column(column, overflow="fold")
    for r in rows:
        table.add_row(r["name"], r["title"], str(r["records"]), str(r["silos"]), "embedded" if r["embedded"] else r["how_to_get"])
    out.print(table)


@app.command()
def rates(out_dir: Out = None, as_json: Json = False) -> None:
    """The ISRL-DP theorems as slopes: excess risk and gradient-mapping norm against epsilon, n, N and d, beside the theory's.

    Each point runs the schedule and noise of its theorem on a problem whose constants are known. A table, a figure, and every point.

    Example: `silodp rates`
    """
    from silodp.lab.runfolder import unused
    from silodp.lab.studies.figures import draw_rates
    from silodp.lab.studies.rates import measure

    folder = unused(out_dir, Path("runs") / "rates", "rates.json")
    with interruptible("nothing is kept, since the whole study takes a few minutes"):
        fits = measure(folder, quiet=as_json)
    draw_rates(fits, folder)
    if as_json:
        print(json.dumps({"fits": fits, "folder": str(folder)}))
        return
    table = Table(title="Log-log slopes: excess risk (Prox-SGD, SVRG) and squared gradient mapping (SPIDER)")
    for column in ("theorem", "algorithm", "against", "slope", "± s.e.", "theory", "as run", "verdict"):
        table.add_column(column, justify="right" if column in ("slope", "± s.e.", "theory", "as run") else "left", overflow="fold")
    for fit in fits:
        slopes = (f"{fit['slope']:+.2f}", f"{fit['slope_error']:.2f}", f"{fit['theory']:+.2f}", f"{fit['as_run']:+.2f}")
        table.add_row(fit["theorem"], fit["algorithm"], fit["against"], *slopes, fit["verdict"])
    out.print(table)
    out.print("as run: the slope of the proof's own terms at the R, K, q, S and noise that ran; flatter, steeper: than either.")
    out.print(f"Everything is in {folder}: rates.csv, rates.json, rates.png, rates.svg.")


if __name__ == "__main__":
    main()
