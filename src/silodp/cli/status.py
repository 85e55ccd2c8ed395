"""`silodp status`: show the state of a study in one place, and the next command. The command only
reads folders, and costs no privacy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, dump, item, say
from silodp.cli.federation_files import RUNS, state_in
from silodp.cli.project import FILE, read_project
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up, shown
from silodp.host.cards import read_card
from silodp.host.schema import load_schema
from silodp.runs import RunFolder, State


def status(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A project of `silodp init`, a federation's folder, or a silo's own.",
            show_default=False,
        ),
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Show the state of a study: its schema, runs, evaluations, silos, approvals and budgets, and
    the next command.

    Examples: `silodp status` · `silodp status study` · `silodp status gate`
    """
    if (folder / FILE).exists():
        found = _project(folder)
    elif federated := _federation(folder):
        found = {"kind": "federation", "folder": str(folder), **federated}
        found["next"] = _next_of_federation(found, f"--folder {folder}")
    elif (folder / "policy.toml").exists():
        found = _silo(folder)
    else:
        raise BadInput(
            f"{folder} is not a project, and not the folder of a federation or a silo: "
            f"it has no {FILE}, {RUNS} or policy.toml. Start a project with `silodp "
            "init`"
        )
    if as_json:
        dump(found)
    else:
        _show(found)


# --- what there is -------------------------------------------------------------------------------


def _project(folder: Path) -> dict[str, Any]:
    settings = read_project(folder)
    runs = _runs(folder / "runs")
    found = {
        "kind": "project",
        "folder": str(folder),
        "schema": _schema(settings),
        "files": settings.get("silo", []),
        "runs": runs,
        "together": _together(runs),
        "federation": _federation(folder / "federation"),
    }
    return found | {"next": _next(found, folder)}


def _schema(settings: dict[str, Any]) -> dict[str, Any]:
    if "schema" not in settings:
        return {"ready": True, "file": None}
    try:
        schema = load_schema(settings["schema"])
    except BadInput as error:
        return {"ready": False, "file": settings["schema"], "why": str(error)}
    columns = [column.name for column in schema.columns] or ["images"]
    about = {
        "ready": True,
        "file": settings["schema"],
        "columns": columns,
        "label": schema.label.name,
        "task": schema.label.task,
    }
    about["person"] = None
    if schema.person:
        about["person"] = schema.person.column
    return about


def _runs(folder: Path) -> list[dict[str, Any]]:
    """Return every run in a folder, the oldest first, with the results of its last evaluation."""
    from silodp.pages.runs import found_in, read

    rows = []
    folders = {}
    if folder.is_dir():
        folders = found_in(folder, depth=1)
    for path in folders.values():
        try:
            run = read(path)
        except BadInput as error:
            rows.append(
                {"folder": str(path), "kind": "unreadable", "state": str(error), "begun": 0.0}
            )
            continue
        record = RunFolder(path).description
        about = {}
        begun = 0.0
        if record.exists():
            about = json.loads(record.read_text("utf-8"))
            begun = record.stat().st_mtime
        spent, _ = max((silo.together for silo in run.silos), default=(None, None))
        held_out = bool(
            about.get("source", {}).get("held_out")
            or any(card.get("held_out") for card in about.get("cards", ()))
        )
        model = (about.get("order") or {}).get("model") or run.about.get("model")
        rows.append(
            {
                "folder": str(path),
                "kind": run.kind,
                "state": run.state,
                "study": about.get("study") or "",
                "model": model,
                "algorithm": run.algorithm,
                "spent_at_most": spent,
                "provided": run.provided,
                "evaluations": len(run.evaluations),
                "found": _found(run.scored),
                "held_out": held_out,
                "begun": begun,
            }
        )
    return sorted(rows, key=lambda row: row["begun"])


def _found(evaluations: Any) -> dict[str, float]:
    """Return the figures of the last evaluation over all silos that are not too noisy."""
    if not evaluations:
        return {}
    rows = evaluations[-1].get("scores") or evaluations[-1].get("silos") or ()
    whole = next(
        (
            row
            for row in rows
            if isinstance(row, dict) and row.get("name") == "all" and "figures" in row
        ),
        None,
    )
    return {
        name: figure["value"]
        for name, figure in (whole or {"figures": {}})["figures"].items()
        if not figure.get("too_noisy")
    }


def _together(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the total spend of the simulations that read the same files as the last one."""
    from silodp.simulation.together import together

    last = next((row for row in reversed(runs) if row["kind"] == "train"), None)
    if not last:
        return None
    same, spent = together(Path(last["folder"]))
    if len(same) > 1:
        return {
            "runs": len(same),
            "silos": {name: {"epsilon": e, "delta": d} for name, (e, d) in spent.items()},
        }
    return None


def _federation(folder: Path) -> dict[str, Any] | None:
    if (state := state_in(folder)) is None:
        return None
    gates = [_gate(Path(policy).parent) for policy in state["silos"].values()]
    return {
        "running": (folder / RUNS).exists(),
        "engine": state["engine"],
        "silos": gates,
        "runs": _runs(folder / "runs"),
    }


def _gate(folder: Path) -> dict[str, Any]:
    """Return the state of a silo on this machine: the approved study and the budget used."""
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.service.approve import approvals
    from silodp.silo.service.policy import DaemonSettings, Policy

    path = folder / "policy.toml"
    rules = Policy.load(path)
    card = read_card(folder / "silo.json")
    opened = DurableLedger.open(Path(DaemonSettings.load(path).ledger))
    charges = [entry for entry in opened.entries() if entry.act == "charge"]
    return {
        "name": rules.silo,
        "study": rules.study,
        "model": card.model,
        "definition": rules.definition,
        "checked": rules.checked,
        "epsilon": rules.epsilon,
        "spent_epsilon": opened.spent(),
        "left": 1 - opened.used(),
        "answers": len(charges),
        "runs": len({entry.run for entry in charges}),
        "askers": [rules.called(key) for key in rules.askers],
        "approvals": [f"{row['time'][:10]} {row['study']}" for row in approvals(path)],
        "expires": rules.expires.isoformat(),
    }


def _silo(folder: Path) -> dict[str, Any]:
    from silodp.host.portable import running
    from silodp.silo.service.policy import DaemonSettings

    path = folder / "policy.toml"
    own = _gate(folder)
    runs = running(DaemonSettings.load(path).ledger)
    if own["checked"]:
        steps = []
    else:
        steps = [f'silodp silo attest {path} --by "NAME"   # once `silodp silo check` was run']
    if runs:
        steps += [f"silodp ledger show {DaemonSettings.load(path).ledger}"]
    else:
        steps += [f"silodp silo serve {path}"]
    return {"kind": "silo", "folder": str(folder), "running": runs, "silos": [own], "next": steps}


# --- what is next --------------------------------------------------------------------------------


def _next(found: dict[str, Any], folder: Path) -> list[str]:
    """Return the next commands, the most likely first."""
    option = f"--project {folder}"
    if not found["schema"]["ready"]:
        return [f"fill in {found['schema']['file']}: {found['schema']['why']}"]
    if found["federation"]:
        return _next_of_federation(
            found["federation"] | {"folder": str(folder / "federation")}, option
        )
    if not found["files"]:
        return [
            (
                f"list the silos' files in {folder / FILE}, for trials on this machine; "
                "or at each silo: silodp silo init"
            )
        ]
    if not found["runs"]:
        return [
            (
                f"silodp silo check {_short(found['files'][0])} --schema "
                f"{_short(found['schema']['file'])}"
            ),
            f"silodp train {option} --held-out 0.2",
        ]
    return [
        *_after(found["runs"][-1], option, "silodp evaluate {} --epsilon 1"),
        f"silodp federation up {option} --held-out 0.2",
    ]


def _after(run: dict[str, Any], option: str, evaluate: str) -> list[str]:
    """Return the commands for the last run."""
    if run["kind"] == "train":
        again = "silodp train"
    else:
        again = "silodp federation run"
    place = _short(run["folder"])
    if run["state"] is State.INTERRUPTED:
        return [f"{again} {option} --resume --out {place}"]
    if run["state"] is State.RUNNING:
        return [
            (
                f"wait for the run in {place}, or watch it: silodp ui "
                f"{_short(str(Path(run['folder']).parent))}"
            )
        ]
    if run["state"] is not State.FINISHED:
        return [f"{again} {option} --new"]
    use = [f"silodp predict {place} NEW.csv --out risks.csv", f"silodp report {place}"]
    if run["held_out"] and not run["evaluations"]:
        return [evaluate.format(place), *use]
    return use


def _next_of_federation(found: dict[str, Any], option: str) -> list[str]:
    silos = found["silos"]
    folder = _short(found["folder"])
    if not found["running"]:
        return [f"silodp federation up --folder {folder}"]
    wanted = max(
        {silo["definition"] for silo in silos},
        key=lambda one: sum(silo["definition"] == one for silo in silos),
    )
    if others := [silo["name"] for silo in silos if silo["definition"] != wanted]:
        study = next(silo["study"] for silo in silos if silo["definition"] == wanted) or "STUDY"
        return [
            f"silodp silo approve {folder}/studies/{study}.toml {folder}/silos/{name}/policy.toml"
            for name in others
        ]
    steps = [
        f'silodp silo attest {folder}/silos/{s["name"]}/policy.toml --by "NAME"'
        for s in silos
        if not s["checked"]
    ][:1]
    if not found["runs"]:
        return [f"silodp federation run {option}", *steps]
    return [
        *_after(found["runs"][-1], option, f"silodp federation evaluate {option}"),
        f"silodp federation propose second {option} --model MODEL",
        *steps,
    ]


def _short(path: str) -> str:
    """Return the path relative to the working directory, if it is inside."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return path


# --- in words ------------------------------------------------------------------------------------


def _show(found: dict[str, Any]) -> None:
    say(f"{found['kind'].capitalize()} {found['folder']}")
    if schema := found.get("schema"):
        item("schema", _schema_words(schema))
    if found["kind"] == "project":
        item("silos' files", ", ".join(map(_short, found["files"])) or "none on this machine")
    for run in found.get("runs", ()):
        item("run", _run_words(run))
    if together := found.get("together"):
        sentence = ", ".join(
            f"{name} {shown(spent['epsilon'])}" for name, spent in together["silos"].items()
        )
        item(
            "spent so far",
            f"over all {together['runs']} simulated runs that share a file, epsilon: {sentence}",
        )
    federation = found
    if found["kind"] == "project":
        federation = found["federation"]
    if found["kind"] == "silo":
        item("gate", {True: "runs", False: "does not run"}[found["running"]])
    elif federation and "engine" in federation:
        does = {True: "runs", False: "is stopped"}[federation["running"]]
        item("federation", f"{does}, {len(federation['silos'])} silos over {federation['engine']}")
    for silo in (federation or {}).get("silos", ()):
        _show_silo(silo)
    if found["kind"] == "project" and federation:
        for run in federation["runs"]:
            item("run", _run_words(run))
    say("Next:")
    for step in found["next"]:
        say(f"  {step}", wrap=False)


def _schema_words(schema: dict[str, Any]) -> str:
    if not schema["ready"]:
        return f"not ready: {schema['why']}"
    words = "none"
    if schema.get("columns"):
        words = f"{len(schema['columns'])} columns, predicts {schema['label']} ({schema['task']})"
    if schema.get("person"):
        words += f", protects each person by {schema['person']}"
    return words


def _run_words(run: dict[str, Any]) -> str:
    if run["kind"] == "unreadable":
        return run["state"]
    words = f"{_short(run['folder'])}: {run['state']}"
    if run["study"]:
        words += f", study {run['study']}"
    if run["model"]:
        words += f", {run['model']}"
    words += f", algorithm {run['algorithm']}"
    if run["spent_at_most"] is not None:
        words += f", epsilon {shown(run['spent_at_most'])} at most{run['provided']}"
    if run["state"] is not State.FINISHED:
        return words
    if not run["evaluations"]:
        return f"{words}; not evaluated"
    figures = ", ".join(
        f"{name.replace('auc', 'AUC')} {value:.3f}" for name, value in run["found"].items()
    )
    return f"{words}; evaluated: {figures or 'too noisy to say'}"


def _show_silo(silo: dict[str, Any]) -> None:
    study = f"the model {silo['model']}"
    if silo["study"]:
        study = f"the study {silo['study']} ({silo['model']})"
    share = rounded_up(100 * (1 - silo["left"]), 1, "f")
    item(
        silo["name"],
        (
            f"approves {study}; epsilon {shown(silo['spent_epsilon'])} of {silo['epsilon']:g} "
            f"spent in {silo['runs']} runs, {share} % of the budget; "
            f"file checked: {silo['checked'] or 'not stated'}"
        ),
    )
    if silo["approvals"]:
        item("", f"approved since it was made: {', '.join(silo['approvals'])}")
