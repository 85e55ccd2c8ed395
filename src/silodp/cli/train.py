"""`silodp train`: one private run with all silos in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Classes, LabelColumn, dump, progress, say, say_advice, show, table
from silodp.cli.interrupted import interruptible
from silodp.cli.options import (
    Json,
    New,
    OutFolder,
    Resume,
    SchemaFile,
    check_writable,
    takes_order,
    typed,
)
from silodp.cli.project import Project, SettingsFile
from silodp.core import local_figures
from silodp.core.errors import BadInput
from silodp.core.figures import ALONE, rounded_up, shown
from silodp.host.plain_files import json_in
from silodp.runs import RunFolder, State
from silodp.server.order import Order

SHOWN = 8
"""Silos that the comparison of alone, together and personal lists; the report lists all."""


@takes_order("noise")
def train(
    order: Order,
    project: Project = None,
    settings_file: SettingsFile = None,
    data: Annotated[str | None, typer.Option(help="A built-in data set, instead of files.")] = None,
    silo: Annotated[
        list[Path] | None,
        typer.Option(help="One CSV, Parquet or NPZ file, or folder of images, for each silo."),
    ] = None,
    schema: SchemaFile = None,
    test: Annotated[
        Path | None,
        typer.Option(help="A file, with --schema, to score on without privacy: for research only."),
    ] = None,
    label: LabelColumn = "label",
    classes: Classes = None,
    scale: Annotated[
        str,
        typer.Option(
            help=(
                "Feature scaling: private (learnt within the budget), none, or a file of "
                "public ranges."
            )
        ),
    ] = "private",
    held_out: Annotated[
        float,
        typer.Option(
            help=(
                "Share of each silo's records held out from training, by position in "
                "the file. Do not sort rows by a value."
            )
        ),
    ] = 0.0,
    out_dir: OutFolder = None,
    resume: Resume = False,
    new: New = False,
    as_json: Json = False,
) -> None:
    """Train one private run in simulation. The result is a model, the transcript of releases, and
    the epsilon spent of each silo.

    All silos are in this process; `silodp federation` gives each its own. Each record's guarantee
    covers the whole run, scaling included. Without --algorithm, the model, algorithm, rounds, step,
    clip and weights are chosen from public facts (sizes, columns, budgets), which costs no privacy.
    The choice is printed with the expected error and recorded in run.json.

    During the run the folder --out gets run.json (the settings) and progress.jsonl. At the end it
    gets model.safetensors, transcript.jsonl and .safetensors (every release), environment.json and
    summary.json. With --held-out it also gets personal.json: on raw records held out, and so not
    private, each silo alone, the model of all together, and a personal model.

    --resume repeats an interrupted run with the same noise, which is stored until the run ends, so
    nothing new is released. Records, model file, settings, versions and threads must be unchanged.
    A model FILE.py that imports other files of yours cannot be resumed; start its run again with
    --new.

    Examples: `silodp train --data wbcd --epsilon 3` · `silodp train --silo a.csv --silo b.csv
    --label outcome --epsilon 2 --epsilon b=1 --model logistic` · `silodp train --data wbcd --trust
    shuffle --participation uniform:10`
    """
    from silodp.simulation.runfolder import folder_for, folder_to_resume
    from silodp.simulation.source import Source
    from silodp.simulation.training import to_resume
    from silodp.simulation.training import train as run

    if resume and new:
        raise BadInput("--resume and --new exclude each other; give one of them")
    first = (project or Path()) / "runs" / "train"
    if resume:
        folder = folder_to_resume(out_dir, first)
    else:
        folder = folder_for(out_dir, first, new=new)
    source = Source(data, tuple(silo or ()), label, classes, schema, test, scale, held_out)
    if resume:
        fields = {"silo": "silos", "from_theory": "noise"}
        order, source = to_resume(
            folder, order, source, {fields.get(name, name) for name in typed()}
        )
    else:
        check_writable(folder)
    if not as_json and not resume and not out_dir and folder != first:
        say(f"{first} already contains a run. This run goes to {folder}.")
    on_advice = say_advice
    if as_json:
        on_advice = _ignore
    with interruptible(lambda: _train_kept(folder)), progress("round", quiet=as_json) as tick:
        summary = run(
            order,
            source,
            folder,
            resume=resume,
            tick=tick,
            on_advice=on_advice,
        )
    if as_json:
        compared = json_in(RunFolder(folder).comparison)
        return dump(summary | ({"on_raw_records": compared} if compared else {}))
    _show(summary)
    _show_comparison(folder)
    _show_together(folder)
    if project:
        say(f"State of the study, and the next command: silodp status {project}")


def _ignore(advice: Any) -> None:
    pass


def _show_comparison(folder: Path) -> None:
    """Print alone, together and personal, where records are held out."""
    found = json_in(RunFolder(folder).comparison)
    for name in found.get("too_few_records", ()):
        say(f"{name} has fewer than 20 records for training: no personal model was fitted.")
    if found.get("too_large"):
        say(
            "The model and its records are too many for a personal model of each silo here. At a "
            "silo: `silodp silo personalise`."
        )
    if not found.get("all"):
        return
    tables = [(local_figures.ALL, found["all"])]
    if len(found["silos"]) <= SHOWN:
        tables += [(silo["name"], silo["figures"]) for silo in found["silos"]]
    lines = [(name, *row) for name, one in tables for row in local_figures.rows(one)]
    heads = "|".join(f"{name}>" for name in local_figures.columns([found["all"]]))
    show(table(f"silo|model|{heads}", lines, title="Held-out records: alone, together, personal"))
    say(local_figures.verdict(found["all"]))
    say(f"{found['note']} At a silo: `silodp silo personalise`.")


def _show_together(folder: Path) -> None:
    """Print the total spend of the runs on the same records. A second model does not get a new
    budget.
    """
    from silodp.simulation.together import together

    runs, spent = together(folder)
    if len(runs) > 1:
        most = max(spent, key=lambda name: spent[name][0])
        others = ", ".join(str(run.folder) for run in runs if run.folder != folder)
        say(
            f"Together with {others}, which read some of the same files, silos have spent up to "
            f"epsilon {shown(spent[most][0])} ({most}). A gate's ledger would add later runs to "
            "it, with any model."
        )


def _show(summary: dict) -> None:
    alone = ALONE.get(summary["trust"])
    rows = []
    for s in summary["silos"]:
        own = []
        if alone and s.get("local_epsilon_at_most") is not None:
            own = [shown(s["local_epsilon_at_most"])]
        elif alone:
            own = ["no bound"]
        rows.append(
            (
                s["name"],
                f"{s['epsilon']:g}",
                rounded_up(s["delta"]),
                shown(s["spent_epsilon"]),
                *own,
            )
        )
    columns = "silo|epsilon>|delta>|spent>"
    if alone:
        columns += f"|{alone}>"
    show(table(columns, rows, title=f"{summary['algorithm']}: {summary['parameters']} parameters"))
    say(f"{summary['questions']} questions, {summary['answers']} answers of silos.")
    say(summary["unit"])
    if summary["trust"] != "isrl":
        say(f"Here {summary['said']}.")
    score = {
        "test_error": "test error",
        "balanced_accuracy": "balanced accuracy",
        "test_loss": "test loss",
    }
    scores = [f"{words} {summary[name]:.3f}" for name, words in score.items() if name in summary]
    if scores:
        say(
            f"{', '.join(scores).capitalize()} on the test records. These figures are not "
            "private: they are computed from raw data, for research only."
        )
    if summary["note"]:
        say(summary["note"])
    say(f"Model: {summary['model']}")


def _train_kept(folder: Path) -> str:
    state = RunFolder(folder).state()
    if state is State.FINISHED:
        return f"the run is finished, and is in {folder}"
    if state is State.NOTHING:
        return "no question was asked yet, and nothing was spent"
    return (
        f"the run is in {folder}, and `silodp train --resume --out {folder}` resumes it "
        "without a second price"
    )
