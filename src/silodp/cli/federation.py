"""`silodp federation`: a whole federation as real processes on this machine, and the server's run
over it or over silos elsewhere.

A federation's folder contains:

- federation.json: what was started; stopped.json once it was stopped
- asker.key: the key that signs the server's queries
- silos/NAME: policy, key, ledger, card and socket of a gate
- shuffler/: the shuffler's files, if there is one
- data/NAME.csv: the files of a built-in set
- logs/, and engine/ with the engine's own files and hub.sock
- runs/
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from silodp.cli import federation_folder as place_of
from silodp.cli import federation_shuffle as shuffle
from silodp.cli.console import Classes, FeatureMapName, dump, say, show, table, tell
from silodp.cli.federation_files import RUNS, STOPPED, carrier_of, load_state, save_state, state_in
from silodp.cli.federation_processes import (
    await_gates,
    command_of,
    launch_gates,
    ports_of,
    site_of,
    stop_all,
)
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Json
from silodp.cli.project import SPEND, Project
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up
from silodp.host.atomic import new_files
from silodp.host.certificates import certificates, expiring
from silodp.host.extension import load
from silodp.host.keys import make_key, public
from silodp.server.order import Order, budgets_of
from silodp.wire.socket import Unreached

ENGINES = ("nvflare", "flower", "direct")
LONGEST_SOCKET = 100
"""The most bytes in a Unix socket's path, with room for what the system adds."""
ASKER = "this server"
"""The silos' name for the server of a federation on one machine."""
ONE_USER = (
    "All of this runs as one user, so the processes are not isolated from each other. "
    "docs/deploy.md shows how to give each its own user."
)

Folder = Annotated[Path, typer.Option(help="The federation's folder.")]


# --- up and down ---------------------------------------------------------------------------------


def up(
    project: Project = None,
    folder: Folder = Path("federation"),
    silos: Annotated[
        int, typer.Option(help="Number of silos into which a built-in data set is split at random.")
    ] = 3,
    data: Annotated[str | None, typer.Option(help="A built-in data set: wbcd or digits.")] = None,
    silo: Annotated[
        list[Path] | None,
        typer.Option(
            help=(
                "A silo's own CSV, Parquet or NPZ file, or folder of images, instead "
                "of --data; once for each silo."
            )
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="The public schema of the silos' own files, instead of --label and --classes."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="nvflare, flower, or direct (no engine: the server uses the gates' sockets)."
        ),
    ] = "nvflare",
    epsilon: Annotated[
        float, typer.Option(help="Each silo's total budget, for all queries ever.")
    ] = 10.0,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or "
                "FILE.py:FUNCTION. By default it is chosen from public facts."
            )
        ),
    ] = None,
    prox: Annotated[
        str, typer.Option(help="Penalty or constraint: zero, l1:0.01, l2-ball:5, ...")
    ] = "zero",
    feature_map: FeatureMapName = "",
    label: Annotated[str, typer.Option(help="The label column of the silos' own files.")] = "label",
    classes: Classes = None,
    seed: Annotated[int, typer.Option(help="Seed of the split of a built-in data set.")] = 0,
    held_out: Annotated[
        float,
        typer.Option(
            help=(
                "Share of each silo's records held out from training, by position in "
                "the file. Do not sort rows by a value. If a file grows, a few records "
                "move."
            )
        ),
    ] = 0.0,
    allow_profile: Annotated[
        bool,
        typer.Option(
            "--allow-profile",
            help="Let the gates answer `federation profile`, `survival`, `estimate` and `logrank`, "
            "at their price.",
        ),
    ] = False,
    trust: Annotated[
        str,
        typer.Option(
            help=(
                "Trust model: isrl (no trust), masks (trusts the other silos to add "
                "their noise) or shuffle (trusts a shuffler, which is one more "
                "process)."
            )
        ),
    ] = "isrl",
    colluding: Annotated[
        int,
        typer.Option(
            help=(
                "Number of silos that may reveal their noise to the server, with --trust masks or "
                "shuffle."
            )
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Create and start gates, couriers and server as real processes on this machine, with mutual
    TLS between server and couriers. A stopped federation continues with its ledgers, by the same
    command or by `up` without data. A failed start leaves no files.

    Example: `silodp federation up --silos 3 --data wbcd`
    """
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    folder = folder.resolve()
    if (folder / RUNS).exists():
        raise BadInput(
            f"{folder} already has a running federation. Stop it by `silodp federation "
            f"down --folder {folder}`, or choose another --folder"
        )
    if not data and not silo and (state := state_in(folder, STOPPED)):
        return _begin(folder, state, as_json)
    if bool(data) == bool(silo):
        raise BadInput(
            "give either --data NAME or one --silo FILE for each silo; only a stopped "
            "federation continues without them"
        )
    if trust not in ("isrl", "masks", "shuffle"):
        raise BadInput(f"trust {trust!r} is unknown over a network; choose isrl, masks or shuffle")
    if colluding < 0 or (colluding and trust == "isrl"):
        raise BadInput(
            f"colluding is {colluding}; it must be 0 or more, and belongs to --trust masks or "
            "shuffle"
        )
    if schema and (data or classes is not None or label != "label"):
        raise BadInput(
            "--schema is for the silos' own files and contains the label and its "
            "classes; leave out --data, --label and --classes"
        )
    sources: int | list[str] = silos
    if not data:
        sources = [str(path.resolve()) for path in silo or ()]
    schema_path = None
    if schema:
        schema_path = str(schema.resolve())
    asked = {
        "data": data,
        "silos": sources,
        "schema": schema_path,
        "engine": engine,
        "epsilon": epsilon,
        "model": model,
        "prox": prox,
        "feature_map": feature_map,
        "label": label,
        "classes": classes,
        "seed": seed,
        "held_out": held_out,
        "allow_profile": allow_profile,
        "trust": trust,
        "colluding": colluding,
    }
    if state := place_of.stopped(folder, asked):
        return _begin(folder, state, as_json)
    if model is None:
        model = _chosen(asked, silo or [], schema, quiet=as_json)
    with (
        interruptible("no files are left, and the same command starts again"),
        place_of.making(folder),
    ):
        state = _make(folder, asked | {"model": model}, silo or [], schema) | {
            "processes": {},
            "asked": asked,
            "ran": False,
        }
        save_state(folder, state, name=STOPPED)
    _begin(folder, state, as_json)


def _chosen(
    asked: Mapping[str, Any],
    silo: Sequence[Path],
    schema: Path | None,
    *,
    quiet: bool,
) -> str:
    """Return the model that the advisor would train in one run over these silos.

    It follows from their sizes and columns only. The silos approve it before training. A run spends
    what the project sets, else the whole budget.
    """
    from silodp.simulation.advised import advised
    from silodp.simulation.source import Source

    spend = click.get_current_context().meta.get(SPEND) or asked["epsilon"]
    order = Order(epsilon=(str(spend),), trust=asked["trust"], prox=asked["prox"])
    source = Source(
        asked["data"], tuple(silo), asked["label"], asked["classes"], schema, None, "none"
    )
    loaded = source.load(0)
    names = loaded.records.names
    counts = loaded.records.counts
    if asked["data"]:
        total = sum(counts)
        silos = asked["silos"]
        names = [f"silo-{i + 1}" for i in range(silos)]
        counts = [total // silos + (i < total % silos) for i in range(silos)]
    trained = [max(1, round(n * (1 - asked["held_out"]))) for n in counts]
    model = advised(
        order, source, loaded, names, trained, budgets_of(order, names, counts, {}), load
    ).order.model
    assert model is not None
    if not quiet:
        say(
            f"The model, chosen from sizes and columns only: {model}. The silos approve "
            "it. --model sets another."
        )
    return model


def _make(
    folder: Path,
    asked: Mapping[str, Any],
    silo: Sequence[Path],
    schema: Path | None,
) -> dict[str, Any]:
    """Make all files of the federation. Return its state for federation.json, without processes."""
    site = site_of(asked["engine"])
    data = asked["data"]
    trust = asked["trust"]
    classes = asked["classes"]
    from silodp.silo.data.datasets import DATASETS
    from silodp.silo.service.provision import provision

    if data:
        files = _cut(folder, asked)
    else:
        files = {_plain(path.stem): path for path in silo}
    if len(files) < len(silo):
        raise BadInput(
            f"the silos' files are {', '.join(map(str, silo))}; give each a different file name"
        )
    for name in files:
        if len(str(folder / "silos" / name / "gate.sock").encode()) > LONGEST_SOCKET:
            raise BadInput(
                f"the path of {folder} is too long for a socket in it; choose a "
                "--folder with a shorter path"
            )
    label = asked["label"]
    registry = None
    state_folder = ""
    if data:
        label = "label"
        registry = folder / "state/ledgers"
        state_folder = str(folder / "state")
        declared = tuple(map(str, range(DATASETS[data].load(0, None).classes)))
    elif classes is None:
        declared = None
    elif classes == "number":
        declared = ()
    else:
        declared = tuple(classes.split(","))
    asker = public(make_key(folder / "asker.key"))
    reading = {"label": label, "classes": declared, "schema": schema}
    reading |= {what: asked[what] for what in ("model", "prox", "feature_map")}
    if trust != "isrl":
        totals = shuffle.totals(trust, folder, files, asker, asked["colluding"], **reading)
    else:
        totals = {}
    # Replies are not padded (`answer_after`): one person runs all silos of such a trial. Padding
    # would only cost time.
    made = [
        provision(
            folder / "silos" / name,
            data=path,
            name=name,
            epsilon=asked["epsilon"],
            askers=[asker],
            queries_per_run=10_000,
            queries_per_hour=100_000,
            statistics=_statistics(asked["held_out"], asked["allow_profile"], trust),
            held_out=asked["held_out"],
            sees_left=(asker,),
            registry=registry,
            study="first",
            asker_names=(ASKER,),
            **reading,
            **totals,
        )
        for name, path in files.items()
    ]
    policies = {one.name: one.policy for one in made}
    state: dict[str, Any] = {
        "version": 1,
        "engine": asked["engine"],
        "silos": policies,
        "registry": state_folder,
    }
    if trust == "masks":
        shuffle.acquaint({one.name: (one.policy, one.key) for one in made})
    if trust == "shuffle":
        from silodp.shuffler.provision import enrol

        enrol(folder / shuffle.SETTINGS, [one.pseudonym for one in made])
        state["shuffler"] = str(folder / shuffle.SETTINGS)
    if site:
        site.provision(folder / "engine", list(shuffle.sites(folder, state)))
    return state


def _plain(name: str) -> str:
    """Return a file's name in the letters that a silo's name may have. Accents are removed. Other
    characters become hyphens.
    """
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]", "-", letters)[:64] or "silo"


def _statistics(held_out: float, profile: bool, trust: str) -> tuple[str, ...]:
    from silodp.silo.service.provision import SCORES, served

    statistics = served(
        (
            *("Grad", "ScaledGrad", "Outcomes", "Moments", "GradDiff", "ClippedDiff"),
            *("LocalSteps", "SteeredSteps", "Gram", "RiskCells"),
        ),
        trust,
    )
    if held_out:
        statistics += SCORES
    if profile:
        statistics += ("Histogram", "ClassCounts", "MissingRates", "Marginals")
        statistics += ("Regression", "GroupClasses")
    return statistics


def _begin(folder: Path, state: dict[str, Any], as_json: bool) -> None:
    """Start gates and engine. If one of them fails, stop them all."""
    site = site_of(state["engine"])
    save_state(folder, state)
    remark = "the started processes are stopped again, and the same command starts them"
    with interruptible(remark), contextlib.ExitStack() as undo:
        undo.callback(stop_all, folder)
        gates = launch_gates(folder, state)
        if site:  # The engine starts while the gates read their records.
            state["processes"] |= site.start(folder / "engine", shuffle.sites(folder, state))
        await_gates(folder, state, gates)
        state["ran"] = True
        save_state(folder, state)
        undo.pop_all()
    _show(folder, state, as_json)


def status(folder: Folder = Path("federation"), as_json: Json = False) -> None:
    """Show the processes, their ports and certificates, the connected silos, and the budgets used.

    Example: `silodp federation status`
    """
    _show(folder.resolve(), load_state(folder), as_json)


def down(folder: Folder = Path("federation"), as_json: Json = False) -> None:
    """Stop every process of the federation. Ledgers, keys and runs remain.

    Example: `silodp federation down`
    """
    load_state(folder)
    left = stop_all(folder.resolve())
    if not left:
        sentence = "Stopped. Ledgers, keys and runs remain."
    else:
        sentence = f"These processes still run: {', '.join(map(str, left))}."
    tell({"stopped": not left, "still_running": left}, as_json, sentence)


def key(
    path: Annotated[Path, typer.Argument(help="A new file for the key. It stays at the server.")],
    as_json: Json = False,
) -> None:
    """Create the key that signs a server's queries. Print its public half for the silos' policies.

    Example: `silodp federation key asker.key`
    """
    made = public(make_key(path))
    tell({"key": made}, as_json, made)


def _cut(folder: Path, asked: Mapping[str, Any]) -> dict[str, Path]:
    """Write a CSV file for each silo, from the training records of a built-in set. Only this user
    can read the files.
    """
    import numpy as np

    from silodp.silo.data.datasets import DATASETS

    data = asked["data"]
    silos = asked["silos"]
    seed = asked["seed"]
    if data not in DATASETS:
        raise BadInput(f"data set {data!r} is unknown; choose one of {', '.join(DATASETS)}")
    if not 1 <= silos <= 1000:
        raise BadInput(f"silos is {silos}; it must be between 1 and 1000")
    train = DATASETS[data].of(seed, None, raw=bool(asked["feature_map"])).train
    x = train.x[train.mask].flatten(1).numpy()
    y = train.y[train.mask].numpy()
    header = ",".join([*(f"f{j}" for j in range(x.shape[1])), "label"])
    files = {}
    for i, part in enumerate(
        np.array_split(np.random.default_rng(seed).permutation(len(y)), silos)
    ):
        rows = (
            ",".join([*map(repr, record.tolist()), str(k)])
            for record, k in zip(x[part], y[part], strict=True)
        )
        files[f"silo-{i + 1}"] = path = folder / "data" / f"silo-{i + 1}.csv"
        with new_files(path.parent, {path.name: "\n".join([header, *rows]) + "\n"}, mode=0o700):
            pass
    return files


# --- what there is -------------------------------------------------------------------------------


def _show(folder: Path, state: dict[str, Any], as_json: bool) -> None:
    processes = [
        {"name": name, "pid": pid, "runs": bool(command_of(pid)), "ports": ports_of(pid)}
        for name, pid in state["processes"].items()
    ]
    silos = [_budget(name, Path(policy)) for name, policy in state["silos"].items()]
    found = {
        "folder": str(folder),
        "engine": state["engine"],
        "connected": _connected(folder, state),
        "processes": processes,
        "silos": silos,
        "certificates": certificates(folder / "engine"),
    }
    if as_json:
        dump(found)
        return
    rows = (
        (
            row["name"],
            row["pid"],
            ("no", "yes")[row["runs"]],
            ", ".join(map(str, row["ports"])) or "-",
        )
        for row in processes
    )
    show(table("process|pid|runs|TCP ports", rows, box=False))
    for certificate in found["certificates"]:
        say(
            f"Certificate of {certificate['subject']}, valid to {certificate['until']}: "
            f"SHA-256 {certificate['sha256']}"
        )
    say(*(f"{wrong[0].upper()}{wrong[1:]}" for wrong in expiring(folder / "engine")))
    for silo in silos:
        share = rounded_up(100 * (1 - silo["left"]), 1, "f")
        say(
            f"{silo['name']}: {silo['records']} records; {share} % of the budget (epsilon "
            f"{silo['epsilon']:g}) is used."
        )
    say(attested({silo["name"]: silo["checked"] for silo in silos}))
    if found["connected"] is None:
        connected = "the engine does not answer"
    else:
        connected = ", ".join(found["connected"]) or "no silo"
    say(f"Connected through {state['engine']}: {connected}.")
    say(ONE_USER)


def attested(checked: Mapping[str, str]) -> str:
    """Return which silos' officers state that their files were checked. The findings themselves
    stay private.
    """
    stated = "; ".join(f"{name} {words}" for name, words in checked.items() if words)
    missing = ", ".join(name for name, words in checked.items() if not words)
    sentences = []
    if stated:
        sentences.append(f"Officers state that `silodp silo check` was run: {stated}.")
    if missing:
        sentences.append(
            f"Not yet stated for {missing}: whether `silodp silo check` was run "
            "(`silodp silo attest`)."
        )
    return " ".join(sentences)


def _connected(folder: Path, state: Mapping[str, Any]) -> list[str] | None:
    try:
        return sorted(carrier_of(folder, state).names())
    except Unreached:
        return None


def _budget(name: str, policy: Path) -> dict[str, Any]:
    from silodp.silo.ledger.durable import DurableLedger

    card = json.loads((policy.parent / "silo.json").read_text())
    ledger = DurableLedger.open(policy.parent / "ledger.db")
    found = {
        "name": name,
        "records": card["records"],
        "epsilon": card["epsilon"],
        "left": 1 - ledger.used(),
    }
    return found | {"policy": str(policy), "checked": card.get("checked", "")}
