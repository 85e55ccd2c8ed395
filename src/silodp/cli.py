"""The command line. Bad input gets one sentence and exit code 2; every command has --json for machines."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from silodp.core.errors import BadInput, Refused
from silodp.lab.audit.command import audit
from silodp.silo.ledger_commands import ledger

app = typer.Typer(
    help="Federated learning for people who do not trust the server: every silo's messages are differentially private for each record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(ledger, name="ledger")
app.command()(audit)
out = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; by default under runs/.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where MNIST or CIFAR-10 lie; `silodp data` says how to get them.")]
AlgorithmName = Annotated[
    str, typer.Option("--algorithm", help="prox-sgd, mb-sgd, local-sgd, prox-svrg, prox-pl-svrg, spider or spider-alternate.")
]
Rounds = Annotated[int, typer.Option(help="Communication rounds R.")]
Phase = Annotated[int, typer.Option(help="SPIDER's phase q: a fresh anchor every q rounds.")]
Clip = Annotated[float, typer.Option(help="Clip threshold L: each record's whole gradient is clipped to this norm.")]
Slope = Annotated[
    float, typer.Option(help="Differences are clipped at slope x the move of w (at most 2 L); inf is the paper's plain form.")
]
LocalSteps = Annotated[int, typer.Option(help="Noisy local steps a round, for local-sgd.")]
Inner = Annotated[int, typer.Option(help="Inner steps of an SVRG epoch.")]
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
    from silodp.lab import compare as lab
    from silodp.lab.figures import draw_comparison

    for name, value in (("rounds", rounds), ("trials", trials), ("hidden", hidden)):
        positive(name, value)
    epsilons = tuple(positive("epsilon", e) for e in epsilon or ((0.75, 3.0, 18.0) if quick else lab.EPSILONS))
    study = lab.Study(data, rounds, 2 if quick else trials, epsilons, hidden, full)
    folder = out_dir or Path("runs") / "-".join(["compare", data, f"R{rounds}", *(["full"] if full else ["quick"] if quick else [])])
    try:
        rows = lab.compare(study, folder, data_dir=data_dir, quiet=as_json)
    except KeyboardInterrupt:
        print("silodp: interrupted; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        raise typer.Exit(130) from None
    draw_comparison(rows, folder, title=f"{data}, R = {rounds}, {study.trials} random splits")
    gains = {
        of: {over: lab.improvement(rows, over, of) for over in ("mb-sgd", "local-sgd", "spider-paper")} for of in ("spider", "spider-diff")
    }
    if as_json:
        print(json.dumps({"rows": rows, "improvement_percent": gains, "note": lab.NOTE, "folder": str(folder)}))
        return
    for table in _comparison_tables(rows, epsilons):
        out.print(table)
    phases = ", ".join(f"{r['settings']['phase']:g}" for r in rows if r["curve"] == "spider")
    out.print(f"SPIDER is tuned as in the paper, phase 1 (which is MB-SGD) included; training loss chose the phases {phases}.")
    out.print("Average relative difference of SPIDER's test error, tuned over all phases / over phases > 1:")
    paper = {"mb-sgd": "MB-SGD (the paper found 1.72 % lower)", "local-sgd": "Local SGD (the paper found 6.06 % lower)"}
    for over in gains["spider"]:
        both = " / ".join(_lower(gains[of][over]) for of in gains)
        out.print(f"  {both} than {paper.get(over, 'SPIDER with the noise of the paper (phase > 1)')}")
    out.print(lab.NOTE)
    out.print(f"Everything is in {folder}: results.csv, summary.json, figure.png, figure.svg.")


def _lower(percent: float) -> str:
    return f"{abs(percent):.2f} % {'lower' if percent >= 0 else 'higher'}"


def _comparison_tables(rows: list[dict], epsilons: tuple[float, ...]) -> list[Table]:
    """Test errors in per cent: with exact accounting, and with the paper's constants beside what they really spend."""
    by = {(r["curve"], r["epsilon"]): r for r in rows}

    def cell(curve: str, epsilon: float | None) -> str:
        r = by.get((curve, epsilon))
        return f"{100 * r['test_error']:.1f} ± {100 * r['standard_error']:.1f}" if r else ""

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
        cells = [(cell(c, e), by.get((c, e))) for c in ("spider-paper", "mb-sgd-paper", "local-sgd-paper")]
        spent = [
            f"[red]{r['spent_epsilon']:.2f}[/red]" if r and r["spent_epsilon"] > e else f"{r['spent_epsilon']:.2f}" if r else ""
            for _, r in cells
        ]
        paper.add_row(f"{e:g}", *(word for (text, _), s in zip(cells, spent, strict=True) for word in (text, s)))
    return [exact, paper]


@app.command()
def plan(
    algorithm: AlgorithmName = "spider",
    records: Annotated[list[int] | None, typer.Option(help="Records in a silo; once for each silo.")] = None,
    rounds: Rounds = 25,
    phase: Phase = 5,
    epsilon: Annotated[float, typer.Option(help="Epsilon of every silo.")] = 3.0,
    delta: Annotated[float | None, typer.Option(help="Delta; 1/n^2 by default.")] = None,
    clip: Clip = 1.0,
    slope: Slope = 1.0,
    local_steps: LocalSteps = 2,
    inner: Inner = 5,
    restarts: Restarts = 2,
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
    dimension: Annotated[int | None, typer.Option(help="d, number of parameters, for the theory.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Before any data is touched: every kind of release, its noise, and what is spent in total.

    Examples: `silodp plan --algorithm mb-sgd --records 1234 --rounds 50 --epsilon 3` ·
    `silodp plan --records 500 --records 2000 --phase 5` · `silodp plan --noise paper --epsilon 18 --json`
    """
    from silodp.lab.planning import Wish, planned

    wish = Wish(
        algorithm=algorithm, records=tuple(records or (1000,)), epsilon=epsilon, delta=delta, clip=positive("clip", clip), noise=noise,
        sampling=sampling, participation=participation, rule=rule, anchor_share=anchor_share, user_level=user_level, seed=seed,
        schedule={"rounds": rounds, "phase": phase, "local_steps": local_steps, "inner": inner, "restarts": restarts, "slope": slope},
        theory={"lipschitz": lipschitz, "smoothness": smoothness, "pl": pl, "gap": gap, "dimension": dimension},
    )  # fmt: skip
    answer = planned(wish)
    if as_json:
        print(json.dumps(answer))
        return
    for silo in answer["silos"]:
        table = Table(title=f"A silo of {silo['records']} records: {algorithm}, epsilon {silo['epsilon']:g}, delta {silo['delta']:.3g}")
        for column in ("release", "count", "sensitivity", "noise std", "noise multiplier"):
            table.add_column(column, justify="left" if column == "release" else "right")
        for r in silo["releases"]:
            table.add_row(r["kind"], str(r["count"]), f"{r['sensitivity']:.5g}", f"{r['noise_std']:.5g}", f"{r['noise_multiplier']:.5g}")
        out.print(table)
        out.print(f"Spends epsilon {silo['spent_epsilon']:.4f} in all ({answer['rule']} rule); mu = {silo['mu']:.4f}.")
    if "refine" in {r["kind"] for r in answer["releases"]}:
        out.print("Differences are listed at their largest clip, 2 L; their noise shrinks with the move of w at the same price.")
    if "theory" in answer:
        out.print_json(data=answer["theory"])


@app.command()
def train(
    data: Annotated[str | None, typer.Option(help="A built-in data set, instead of files.")] = None,
    silo: Annotated[list[Path] | None, typer.Option(help="One CSV, Parquet or NPZ file for each silo.")] = None,
    label: Annotated[str, typer.Option(help="Column that holds the label.")] = "label",
    classes: Annotated[str | None, typer.Option(help="Public list of classes, such as benign,malignant; 'number' for regression.")] = None,
    algorithm: AlgorithmName = "spider",
    model: Annotated[str, typer.Option(help="linear, logistic, mlp:HIDDEN, or FILE.py:FUNCTION for your own torch module.")] = "mlp:8",
    prox: Annotated[str, typer.Option(help="Penalty or constraint: zero, l1:0.01, l2:0.1, l2-ball:5, box:-1:1, ...")] = "zero",
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
    data_dir: DataDir = None,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """One private run: a model, the transcript of releases, and what each silo has spent.

    Examples: `silodp train --data wbcd --epsilon 3` ·
    `silodp train --silo a.csv --silo b.csv --label outcome --epsilon 2 --epsilon b=1 --model logistic`
    """
    from silodp.lab.training import Request, run_request

    request = Request(
        data=data, silos=tuple(silo or ()), label=label, classes=classes, algorithm=algorithm, model=model, prox=prox,
        epsilon=tuple(epsilon or ("3",)), delta=tuple(delta or ()), step=positive("step", step), clip=positive("clip", clip),
        sampling=sampling, participation=participation, rule=rule, anchor_share=anchor_share, scale=scale, output_rule=output_rule,
        user_level=user_level, seed=seed, data_dir=data_dir, folder=out_dir or Path("runs") / "train",
        schedule={"rounds": rounds, "phase": phase, "local_steps": local_steps, "inner": inner, "restarts": restarts, "slope": slope},
    )  # fmt: skip
    summary = run_request(request, quiet=as_json)
    if as_json:
        print(json.dumps(summary))
        return
    table = Table(title=f"{summary['algorithm']}: {summary['releases']} releases, {summary['parameters']} parameters")
    for column in ("silo", "epsilon", "delta", "spent"):
        table.add_column(column, justify="left" if column == "silo" else "right")
    for s in summary["silos"]:
        table.add_row(s["name"], f"{s['epsilon']:g}", f"{s['delta']:.3g}", f"{s['spent_epsilon']:.4f}")
    out.print(table)
    if "test_error" in summary:
        out.print(f"Test error {summary['test_error']:.3f} on held-out records (looked at raw data: a research figure, not private).")
    if summary["note"]:
        out.print(summary["note"])
    out.print(f"Model: {summary['model']}")


@app.command()
def data(as_json: Json = False) -> None:
    """The built-in data sets, and how to get those that are not embedded."""
    from silodp.silo.datasets import DATASETS

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
def rates(
    repeats: Annotated[int, typer.Option(help="Independent runs averaged at each point.")] = 100,
    out_dir: Out = None,
    as_json: Json = False,
) -> None:
    """How excess risk scales with the privacy parameter mu and with n, on a strongly convex problem, with fitted slopes and a figure.

    Example: `silodp rates`
    """
    from silodp.lab.figures import draw_rates
    from silodp.lab.rates import measure

    folder = out_dir or Path("runs") / "rates"
    fits = measure(repeats, folder)
    draw_rates(fits, folder)
    if as_json:
        print(json.dumps({"fits": fits, "folder": str(folder)}))
        return
    table = Table(title="log-log slope of excess risk where noise dominates")
    for column in ("algorithm", "against", "slope", "theory"):
        table.add_column(column)
    for fit in fits:
        table.add_row(fit["algorithm"], fit["against"], f"{fit['slope']:+.3f}", f"{fit['theory']:+d}")
    out.print(table)
    out.print(f"Figure and numbers: {folder}")


if __name__ == "__main__":
    main()
