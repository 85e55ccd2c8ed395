"""`silodp federation`: a whole federation as real processes on this machine, and the server's run
over it or over silos elsewhere.

A federation's folder has federation.json (what was started; stopped.json once it was stopped),
asker.key (signs the server's queries), silos/NAME (policy, key, ledger, card and socket of a gate),
shuffler/ (of a shuffler, where there is one), data/NAME.csv (of a built-in set), logs/, engine/
(the engine's own files, and hub.sock), and runs/.
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
from silodp.core.figures import left_of
from silodp.host.atomic import new_files
from silodp.host.certificates import certificates, expiring
from silodp.host.extension import load
from silodp.host.keys import make_key, public
from silodp.server.order import Order, budgets_of
from silodp.wire.socket import Unreached

ENGINES = ("nvflare", "flower", "direct")
LONGEST_SOCKET = 100
"""Bytes of a Unix socket's path, with room for what the system adds."""
ASKER = "this server"
"""What silos call the server of a federation on one machine."""
ONE_USER = (
    "All of this runs as one user: between these processes there are walls only where "
    "docs/deploy.md gives each a user of its own."
)

Folder = Annotated[Path, typer.Option(help="The federation's folder.")]


# --- up and down ---------------------------------------------------------------------------------


def up(
    project: Project = None,
    folder: Folder = Path("federation"),
    silos: Annotated[
        int, typer.Option(help="Into how many silos a built-in data set is cut, at random.")
    ] = 3,
    data: Annotated[str | None, typer.Option(help="A built-in data set: wbcd or digits.")] = None,
    silo: Annotated[
        list[Path] | None,
        typer.Option(
            help=(
                "A silo's own CSV, Parquet or NPZ file, or folder of images, instead; once for "
                "each."
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
            help="nvflare, flower, or direct: no engine, the server asks the gates' sockets."
        ),
    ] = "nvflare",
    epsilon: Annotated[
        float, typer.Option(help="Each silo's budget for everything that will ever be asked.")
    ] = 10.0,
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:FUNCTION; "
                "chosen from public facts by default."
            )
        ),
    ] = None,
    prox: Annotated[
        str, typer.Option(help="Penalty or constraint: zero, l1:0.01, l2-ball:5, ...")
    ] = "zero",
    feature_map: FeatureMapName = "",
    label: Annotated[
        str, typer.Option(help="Column that holds the label, in the silos' own files.")
    ] = "label",
    classes: Classes = None,
    seed: Annotated[int, typer.Option(help="How a built-in data set is cut.")] = 0,
    held_out: Annotated[
        float,
        typer.Option(
            help=(
                "Share of each silo's records kept out of training, by position: do not sort "
                "rows by a value. A file that grows moves a few."
            )
        ),
    ] = 0.0,
    allow_profile: Annotated[
        bool,
        typer.Option(
            "--allow-profile", help="Let the gates answer `federation profile`, at its price."
        ),
    ] = False,
    trust: Annotated[
        str,
        typer.Option(
            help=(
                "Who is trusted: isrl (nobody), masks (the other silos, to add their noise) or "
                "shuffle (a shuffler, one more process)."
            )
        ),
    ] = "isrl",
    colluding: Annotated[
        int, typer.Option(help="Silos that may tell the server their noise, with --trust masks.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Make and start gates, couriers and server as real processes on this machine, with mutual TLS
    between server and couriers.

    A federation that was stopped goes on, with its ledgers, by the same command, or by `up` without
    data. A start that fails leaves nothing.

    Example: `silodp federation up --silos 3 --data wbcd`
    """
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    folder = folder.resolve()
    if (folder / RUNS).exists():
        raise BadInput(
            f"{folder} has a federation already; `silodp federation down --folder "
            f"{folder}` stops it; to start anew choose another --folder"
        )
    if not data and not silo and (state := state_in(folder, STOPPED)):
        return _begin(folder, state, as_json)
    if bool(data) == bool(silo):
        raise BadInput(
            "give either --data NAME or one --silo FILE for each silo; only a federation "
            "that was stopped goes on without"
        )
    if trust not in ("isrl", "masks", "shuffle"):
        raise BadInput(f"trust {trust!r} is unknown over a network; choose isrl, masks or shuffle")
    if colluding < 0 or (colluding and trust != "masks"):
        raise BadInput(
            f"colluding is {colluding}; it must be 0 or more, and belongs to --trust masks"
        )
    if schema and (data or classes is not None or label != "label"):
        raise BadInput(
            "--schema is for the silos' own files, and has the label and its classes; "
            "leave out --data, --label and --classes"
        )
    files = [str(path.resolve()) for path in silo or ()]
    asked = {
        "data": data,
        "silos": silos if data else files,
        "schema": str(schema.resolve()) if schema else None,
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
        interruptible("nothing was kept, and the same command begins anew"),
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
    """The model that the advisor would train in one run over these silos, from their sizes and
    columns alone: they approve it before anybody trains.

    A run spends what the project says, else the whole budget.
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
            f"The model, chosen from sizes and columns alone: {model}. The silos approve "
            "it; --model names another."
        )
    return model


def _make(
    folder: Path,
    asked: Mapping[str, Any],
    silo: Sequence[Path],
    schema: Path | None,
) -> dict[str, Any]:
    """Everything but the processes; what federation.json says of it."""
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
            f"the silos' files are {', '.join(map(str, silo))}; each needs a file name of its own"
        )
    for name in files:
        if len(str(folder / "silos" / name / "gate.sock").encode()) > LONGEST_SOCKET:
            raise BadInput(
                f"the path of {folder} is too long for a socket in it; choose a --folder "
                "nearer to the root"
            )
    if data:
        declared = tuple(map(str, range(DATASETS[data].load(0, None).classes)))
    elif classes is None:
        declared = None
    elif classes == "number":
        declared = ()
    else:
        declared = tuple(classes.split(","))
    asker = public(make_key(folder / "asker.key"))
    reading = {"label": "label" if data else asked["label"], "classes": declared, "schema": schema}
    reading |= {what: asked[what] for what in ("model", "prox", "feature_map")}
    if trust != "isrl":
        totals = shuffle.totals(trust, folder, files, asker, asked["colluding"], **reading)
    else:
        totals = {}
    # Replies are not padded (`answer_after`): one person has all silos of such a trial, and would
    # only wait.
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
            registry=folder / "state/ledgers" if data else None,
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
        "registry": str(folder / "state") if data else "",
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
    """A file's name in the letters that a silo's may have: without accents, and with hyphens for
    what is left.
    """
    letters = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]", "-", letters)[:64] or "silo"


def _statistics(held_out: float, profile: bool, trust: str) -> tuple[str, ...]:
    from silodp.silo.service.provision import SCORES, served

    training = served(
        ("Grad", "GradDiff", "ClippedDiff", "LocalSteps", "SteeredSteps", "Gram"), trust
    )
    return (
        training
        + SCORES * bool(held_out)
        + ("Histogram", "Moments", "ClassCounts", "MissingRates") * profile
    )


def _begin(folder: Path, state: dict[str, Any], as_json: bool) -> None:
    """Starts gates and engine, or none of them."""
    site = site_of(state["engine"])
    save_state(folder, state)
    kept = "what had been started is stopped again, and the same command starts it"
    with interruptible(kept), contextlib.ExitStack() as undo:
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
    """What runs, on which ports, under which certificates, which silos are connected, and what is
    left of their budgets.

    Example: `silodp federation status`
    """
    _show(folder.resolve(), load_state(folder), as_json)


def down(folder: Folder = Path("federation"), as_json: Json = False) -> None:
    """Stop every process of the federation; ledgers, keys and runs stay.

    Example: `silodp federation down`
    """
    load_state(folder)
    left = stop_all(folder.resolve())
    if not left:
        said = "Stopped; ledgers, keys and runs are kept."
    else:
        said = f"These still run: {', '.join(map(str, left))}."
    tell({"stopped": not left, "still_running": left}, as_json, said)


def key(
    path: Annotated[
        Path, typer.Argument(help="A new file for the key, which stays with the server.")
    ],
    as_json: Json = False,
) -> None:
    """Make the key with which a server signs its queries, and print its public half for the silos'
    policies.

    Example: `silodp federation key asker.key`
    """
    made = public(make_key(path))
    dump({"key": made}) if as_json else say(made)


def _cut(folder: Path, asked: Mapping[str, Any]) -> dict[str, Path]:
    """A CSV file for each silo, which only this user may read, of the training records of a
    built-in set.
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
            "yes" if row["runs"] else "no",
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
        say(
            f"{silo['name']}: {silo['records']} records; {left_of(1 - silo['left'])} of "
            f"epsilon {silo['epsilon']:g} is left."
        )
    say(attested({silo["name"]: silo["checked"] for silo in silos}))
    if found["connected"] is not None:
        said = ", ".join(found["connected"])
    else:
        said = "the engine does not answer"
    say(f"Connected through {state['engine']}: {said or 'nobody'}.")
    say(ONE_USER)


def attested(checked: Mapping[str, str]) -> str:
    """Whose officers say that their files were checked; never what was found."""
    said = "; ".join(f"{name} {words}" for name, words in checked.items() if words)
    lacks = ", ".join(name for name, words in checked.items() if not words)
    parts = [
        f"as each officer says: {said}" if said else "",
        f"nobody has said so of {lacks} (`silodp silo attest`)" if lacks else "",
    ]
    if said:
        return f"`silodp silo check` was run, {'; '.join(part for part in parts if part)}."
    return f"Of `silodp silo check`, {parts[1]}."


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
