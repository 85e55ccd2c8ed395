"""`silodp train`: one private run with all silos in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
import typer
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from silodp.cli.interrupted import interruptible
from silodp.cli.options import (
    AlgorithmName,
    AnchorShare,
    Clip,
    DataDir,
    Inner,
    Json,
    Kappa,
    LocalSteps,
    Momentum,
    Participation,
    Phase,
    Restarts,
    Rounds,
    RuleName,
    SamplingName,
    Slope,
    positive,
)
from silodp.cli.project import Project
from silodp.core.errors import BadInput

out = Console(highlight=False)


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
