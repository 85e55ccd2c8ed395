"""`silodp status`: where a study stands, in one place, and what the next command is. It reads
folders, asks nobody, and costs nothing.
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
from silodp.core.figures import left_of, shown
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
    """Where a study stands: its schema, runs, evaluations, silos, approvals and budgets, and what
    the next command is.

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
            f"{folder} is no project, no federation's folder and no silo's: it has no "
            f"{FILE}, {RUNS} or policy.toml; `silodp init` begins a project"
        )
    return dump(found) if as_json else _show(found)


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
    return about | {"person": schema.person.column if schema.person else None}


def _runs(folder: Path) -> list[dict[str, Any]]:
    """Every run in a folder, the oldest first, with what its last evaluation found."""
    from silodp.pages.runs import found_in, read

    rows = []
    for path in found_in(folder, depth=1).values() if folder.is_dir() else ():
        try:
            run = read(path)
        except BadInput as error:
            rows.append(
                {"folder": str(path), "kind": "unreadable", "state": str(error), "begun": 0.0}
            )
            continue
        record = RunFolder(path).description
        if record.exists():
            about = json.loads(record.read_text("utf-8"))
        else:
            about = {}
        spent = max((silo.together for silo in run.silos), default=None)
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
                "spent_at_most": spent[0] if spent else None,
                "provided": run.provided,
                "evaluations": len(run.evaluations),
                "found": _found(run.scored),
                "held_out": held_out,
                "begun": record.stat().st_mtime if record.exists() else 0.0,
            }
        )
    return sorted(rows, key=lambda row: row["begun"])


def _found(evaluations: Any) -> dict[str, float]:
    """The figures of the last evaluation over all silos that the noise allows to say."""
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
    """What the simulations that read the same files as the last one have spent in all."""
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
    """A silo on this machine: what it approves, and what is left."""
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
    from silodp.host.lock import running
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
    """The next commands, the likeliest first."""
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
                f"list the silos' files in {folder / FILE}, to try things here; or at each "
                "silo: silodp silo init"
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
    """What may be done with the last run."""
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
                f"wait for the run in {place}, or look at it: silodp ui "
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
    """As one would type it here."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return path


# --- in words ------------------------------------------------------------------------------------


def _show(found: dict[str, Any]) -> None:
    say(f"{found['kind'].capitalize()} {found['folder']}")
    if schema := found.get("schema"):
        if schema.get("columns"):
            said = (
                f"{len(schema['columns'])} columns, predicts {schema['label']} ({schema['task']})"
            )
        else:
            said = "none"
        if schema.get("person"):
            unit = f", protects each person by {schema['person']}"
        else:
            unit = ""
        item("schema", said + unit if schema["ready"] else "not ready: " + schema["why"])
    if found["kind"] == "project":
        item("silos' files", ", ".join(map(_short, found["files"])) or "none on this machine")
    for run in found.get("runs", ()):
        item("run", _run_words(run))
    if together := found.get("together"):
        said = ", ".join(
            f"{name} {shown(spent['epsilon'])}" for name, spent in together["silos"].items()
        )
        item("in simulation", f"over {together['runs']} runs of the same files, epsilon: {said}")
    if found["kind"] == "project":
        federation = found["federation"]
    else:
        federation = found
    if found["kind"] == "silo":
        item("gate", "runs" if found["running"] else "does not run")
    elif federation and "engine" in federation:
        if federation["running"]:
            does = "runs"
        else:
            does = "is stopped"
        item("federation", f"{does}, {len(federation['silos'])} silos over {federation['engine']}")
    for silo in (federation or {}).get("silos", ()):
        _show_silo(silo)
    if found["kind"] == "project" and federation:
        for run in federation["runs"]:
            item("run", _run_words(run))
    say("Next:")
    for step in found["next"]:
        say(f"  {step}", wrap=False)


def _run_words(run: dict[str, Any]) -> str:
    if run["kind"] == "unreadable":
        return run["state"]
    what = f"{_short(run['folder'])}: {run['state']}" + (
        f", study {run['study']}" if run["study"] else ""
    )
    what += f", {run['model']}" * bool(run["model"]) + f" by {run['algorithm']}"
    if run["spent_at_most"] is not None:
        spent = f", epsilon {shown(run['spent_at_most'])} at most{run['provided']}"
    else:
        spent = ""
    figures = ", ".join(f"{name} {value:.3f}" for name, value in run["found"].items())
    if run["evaluations"]:
        scored = f"; evaluated: {figures or 'too noisy to say'}"
    else:
        scored = "; not evaluated"
    return what + spent + scored * (run["state"] is State.FINISHED)


def _show_silo(silo: dict[str, Any]) -> None:
    if silo["study"]:
        study = f"the study {silo['study']} ({silo['model']})"
    else:
        study = f"the model {silo['model']}"
    item(
        silo["name"],
        (
            f"approves {study}; epsilon {shown(silo['spent_epsilon'])} of {silo['epsilon']:g} "
            f"spent in {silo['runs']} runs, {left_of(1 - silo['left'])} left; "
            f"file checked: {silo['checked'] or 'nobody has said so'}"
        ),
    )
    if silo["approvals"]:
        item("", f"approved since it was made: {', '.join(silo['approvals'])}")
