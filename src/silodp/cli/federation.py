"""`silodp federation`: a whole federation as real processes on this machine, and the server's run over it or over silos elsewhere.

A federation's folder has federation.json (what was started; stopped.json once it was stopped), asker.key (signs the server's queries), silos/NAME (policy, key, ledger, card
and socket of a gate), shuffler/ (of a shuffler, where there is one), data/NAME.csv (of a built-in set), logs/, engine/ (the engine's own files, and hub.sock), and runs/.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from silodp.cli import console
from silodp.cli import federation_folder as place_of
from silodp.cli import federation_shuffle as shuffle
from silodp.cli.interrupted import interruptible, same_command
from silodp.cli.project import Project
from silodp.core.errors import BadInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from silodp.core.problem.problem import Problem
    from silodp.core.protocol.quote import HoldReply
    from silodp.server.remote import Card, Carrier
    from silodp.server.run import Order

federation = console.group("Silos as processes of their own: start them, train over them, stop them.")
out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

ENGINES = ("nvflare", "flower", "direct")
LONGEST_SOCKET = 100
"""Bytes of a Unix socket's path, with room for what the system adds."""
ONE_USER = "All of this runs as one user: between these processes there are walls only where docs/deploy.md gives each a user of its own."

Folder = Annotated[Path, typer.Option(help="The federation's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")]


# --- up and down --------------------------------------------------------------------------------------------------------------------


@federation.command()
def up(
    project: Project = None,
    folder: Folder = Path("federation"),
    silos: Annotated[int, typer.Option(help="Into how many silos a built-in data set is cut, at random.")] = 3,
    data: Annotated[str | None, typer.Option(help="A built-in data set: wbcd, digits; others with --data-dir.")] = None,
    silo: Annotated[
        list[Path] | None, typer.Option(help="A silo's own CSV, Parquet or NPZ file, or folder of images, instead; once for each.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="The public schema of the silos' own files, instead of --label and --classes.")
    ] = None,
    engine: Annotated[str, typer.Option(help="nvflare, flower, or direct: no engine, the server asks the gates' sockets.")] = "nvflare",
    epsilon: Annotated[float, typer.Option(help="Each silo's budget for everything that will ever be asked.")] = 10.0,
    model: Annotated[str, typer.Option(help="linear, logistic, mlp:HIDDEN, cnn, or FILE.py:FUNCTION.")] = "mlp:16",
    prox: Annotated[str, typer.Option(help="Penalty or constraint: zero, l1:0.01, l2-ball:5, ...")] = "zero",
    label: Annotated[str, typer.Option(help="Column that holds the label, in the silos' own files.")] = "label",
    classes: Annotated[str | None, typer.Option(help="Public list of classes, such as benign,malignant; 'number' for regression.")] = None,
    seed: Annotated[int, typer.Option(help="How a built-in data set is cut.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where a data set lies that is not built in.")] = None,
    held_out: Annotated[
        float,
        typer.Option(
            help="Share of each silo's records kept out of training, by position: do not sort rows by a value. A file that grows moves a few."
        ),
    ] = 0.0,
    allow_profile: Annotated[
        bool, typer.Option("--allow-profile", help="Let the gates answer `federation profile`, at its price.")
    ] = False,
    trust: Annotated[str, typer.Option(help="Who is trusted: isrl (nobody), or shuffle (a shuffler, one more process).")] = "isrl",
    as_json: Json = False,
) -> None:
    """Make and start gates, couriers and server as real processes on this machine, with mutual TLS between server and couriers.

    A federation that was stopped goes on, with its ledgers, by the same command, or by `up` without data. A start that fails leaves nothing.

    Example: `silodp federation up --silos 3 --data wbcd`
    """
    if engine not in ENGINES:
        raise BadInput(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    folder = folder.resolve()
    if (folder / "federation.json").exists():
        raise BadInput(
            f"{folder} has a federation already; `silodp federation down --folder {folder}` stops it; to start anew choose another --folder"
        )
    if not data and not silo and (folder / "stopped.json").exists():
        return _begin(folder, json.loads((folder / "stopped.json").read_text()), as_json)
    if bool(data) == bool(silo):
        raise BadInput("give either --data NAME or one --silo FILE for each silo; only a federation that was stopped goes on without")
    if trust not in ("isrl", "shuffle"):
        raise BadInput(f"trust {trust!r} is unknown over a network; choose isrl or shuffle")
    if schema and (data or classes is not None or label != "label"):
        raise BadInput("--schema is for the silos' own files, and has the label and its classes; leave out --data, --label and --classes")
    files = [str(path.resolve()) for path in silo or ()]
    asked = {
        "data": data, "silos": silos if data else files, "schema": str(schema.resolve()) if schema else None, "engine": engine, "epsilon": epsilon,
        "model": model, "prox": prox, "label": label, "classes": classes, "seed": seed, "held_out": held_out, "allow_profile": allow_profile,
        "trust": trust,
    }  # fmt: skip
    if state := place_of.stopped(folder, asked):
        return _begin(folder, state, as_json)
    with interruptible("nothing was kept, and the same command begins anew"), place_of.making(folder):
        state = _make(
            folder, data, silos, silo, schema, engine, epsilon, model, prox, label, classes, seed, data_dir, held_out, allow_profile, trust
        )
        _save(folder, state | {"processes": {}, "asked": asked, "ran": False}, name="stopped.json")
    _begin(folder, json.loads((folder / "stopped.json").read_text()), as_json)


def _make(
    folder: Path, data: str | None, silos: int, silo: list[Path] | None, schema: Path | None, engine: str, epsilon: float, model: str, prox: str,
    label: str, classes: str | None, seed: int, data_dir: Path | None, held_out: float, allow_profile: bool, trust: str,
) -> dict[str, Any]:  # fmt: skip
    """Everything but the processes; what federation.json says of it."""
    site = _site(engine)
    from silodp.silo.service.provision import provision

    files = _cut(folder, data, silos, seed, data_dir) if data else {path.stem: path for path in silo or ()}
    if len(files) != (silos if data else len(silo or ())):
        raise BadInput(f"the silos' files are {', '.join(map(str, silo or ()))}; each needs a file name of its own")
    for name in files:
        if len(str(folder / "silos" / name / "gate.sock").encode()) > LONGEST_SOCKET:
            raise BadInput(f"the path of {folder} is too long for a socket in it; choose a --folder nearer to the root")
    from silodp.silo.data.datasets import DATASETS

    declared = (
        tuple(map(str, range(DATASETS[data].load(0, data_dir).classes))) if data
        else None if classes is None else () if classes == "number" else tuple(classes.split(","))
    )  # fmt: skip
    key = _new_key(folder / "asker.key")
    asker, reading = key.public_key().public_bytes_raw().hex(), {"label": "label" if data else label, "classes": declared, "schema": schema}
    reading |= {"model": model, "prox": prox}
    shuffled = shuffle.made(folder, files, asker, **reading) if trust == "shuffle" else {}
    policies, pseudonyms = {}, []
    for name, path in files.items():
        made = provision(
            folder / "silos" / name, data=path, name=name, epsilon=epsilon, askers=[asker], queries_per_run=10_000, queries_per_hour=100_000,
            statistics=_statistics(held_out, allow_profile), held_out=held_out, sees_left=(asker,), registry=folder / "state/ledgers" if data else None,
            **reading, **shuffled,
        )  # fmt: skip
        policies[name] = made.policy
        pseudonyms.append(made.pseudonym)
    state: dict[str, Any] = {"version": 1, "engine": engine, "silos": policies, "registry": str(folder / "state") if data else ""}
    if shuffled:
        from silodp.shuffler.provision import enrol

        enrol(folder / shuffle.SETTINGS, pseudonyms)
        state["shuffler"] = str(folder / shuffle.SETTINGS)
    if site:
        site.provision(folder / "engine", list(shuffle.sites(folder, state)))
    return state


def _statistics(held_out: float, profile: bool) -> tuple[str, ...]:
    training = ("Grad", "GradDiff", "LocalSteps", "SteeredSteps")
    return training + ("Score",) * bool(held_out) + ("Histogram", "Moments", "ClassCounts", "MissingRates") * profile


def _begin(folder: Path, state: dict[str, Any], as_json: bool) -> None:
    """Starts gates and engine, or none of them."""
    site = _site(state["engine"])
    _save(folder, state)
    kept = "what had been started is stopped again, and the same command starts it"
    with interruptible(kept), contextlib.ExitStack() as undo:
        undo.callback(_stop, folder)
        _start_gates(folder, state)
        if site:
            state["processes"] |= site.start(folder / "engine", shuffle.sites(folder, state))
        state["ran"] = True
        _save(folder, state)
        undo.pop_all()
    _show(folder, state, as_json)


@federation.command()
def status(folder: Folder = Path("federation"), as_json: Json = False) -> None:
    """What runs, on which ports, under which certificates, which silos are connected, and what is left of their budgets.

    Example: `silodp federation status`
    """
    _show(folder.resolve(), _load(folder), as_json)


@federation.command()
def down(folder: Folder = Path("federation")) -> None:
    """Stop every process of the federation; ledgers, keys and runs stay.

    Example: `silodp federation down`
    """
    _load(folder)
    left = _stop(folder.resolve())
    out.print("Stopped; ledgers, keys and runs are kept." if not left else f"These still run: {', '.join(map(str, left))}.")


@federation.command()
def key(path: Annotated[Path, typer.Argument(help="A new file for the key, which stays with the server.")]) -> None:
    """Make the key with which a server signs its queries, and print its public half for the silos' policies.

    Example: `silodp federation key asker.key`
    """
    print(_new_key(path).public_key().public_bytes_raw().hex())


def _site(engine: str) -> Any:
    """The engine's own module: provision(folder, silos), start(folder, sockets) -> {name: pid}, stop(folder); None for direct."""
    if engine == "direct":
        return None
    try:
        return importlib.import_module(f"silodp.wire.{engine}.site")
    except ModuleNotFoundError as error:
        raise BadInput(f"engine {engine} is not installed ({error.name}); install silodp[{engine}], or use --engine direct") from None


def _cut(folder: Path, data: str, silos: int, seed: int, data_dir: Path | None) -> dict[str, Path]:
    """A CSV file for each silo, which only this user may read, of the training records of a built-in set."""
    import numpy as np

    from silodp.silo.data.datasets import DATASETS

    if data not in DATASETS:
        raise BadInput(f"data set {data!r} is unknown; choose one of {', '.join(DATASETS)}")
    if not 1 <= silos <= 1000:
        raise BadInput(f"silos is {silos}; it must be between 1 and 1000")
    train = DATASETS[data].load(seed, data_dir).train
    x, y = train.x[train.mask].flatten(1).numpy(), train.y[train.mask].numpy()
    (folder / "data").mkdir(mode=0o700, parents=True, exist_ok=True)
    header, files = ",".join([*(f"f{j}" for j in range(x.shape[1])), "label"]), {}
    for i, part in enumerate(np.array_split(np.random.default_rng(seed).permutation(len(y)), silos)):
        rows = (",".join([*map(repr, record.tolist()), str(k)]) for record, k in zip(x[part], y[part], strict=True))
        files[f"silo-{i + 1}"] = path = folder / "data" / f"silo-{i + 1}.csv"
        with _new_file(path) as file:
            file.write("\n".join([header, *rows]) + "\n")
    return files


def _start_gates(folder: Path, state: dict[str, Any]) -> None:
    """Afterwards every gate listens, the shuffler too where there is one, and the folder has their pids from the moment they were started."""
    (folder / "logs").mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | ({"SILODP_STATE": state["registry"]} if state["registry"] else {})
    started: dict[str, subprocess.Popen] = {}
    state["processes"] = {}
    for name, (word, settings) in shuffle.daemons(state).items():
        with open(folder / "logs" / f"{name.replace(' ', '-')}.txt", "ab") as log:
            command = [sys.executable, "-P", "-m", "silodp.cli", word, "serve", settings]
            started[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        state["processes"][name] = started[name].pid
        _save(folder, state)
    from silodp.wire.hub import Direct

    gates, deadline = Direct(shuffle.sites(folder, state)), time.monotonic() + 600
    while len(gates.names()) < len(started):
        for name, process in started.items():
            if process.poll() is not None:
                lines = (folder / "logs" / f"{name.replace(' ', '-')}.txt").read_text().strip().splitlines()
                raise BadInput(f"the {name} did not start: {lines[-1].removeprefix('silodp: ') if lines else 'it said nothing'}")
        if time.monotonic() > deadline:
            raise BadInput(f"the gates did not start within ten minutes; look into {folder / 'logs'}")
        time.sleep(0.1)


def _stop(folder: Path) -> list[int]:
    """Ends the engine's processes and the gates that are still this federation's; answers with the gates that did not end."""
    state = _load(folder)
    if site := _site(state["engine"]):
        with contextlib.suppress(FileNotFoundError):
            site.stop(folder / "engine")
    known = shuffle.daemons(state)
    gates = {pid: known[name][1] for name, pid in state["processes"].items() if name in known}
    pids = [pid for pid, policy in gates.items() if policy in _command(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 300
    while (left := [pid for pid in pids if gates[pid] in _command(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not left:
        _save(folder, state | {"processes": {}}, name="stopped.json")
        (folder / "federation.json").unlink()
    return left


def _command(pid: int) -> list[str]:
    """The words that started the process; none if it has ended."""
    try:
        return [word for word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0") if word]
    except OSError:
        return []


# --- what there is ------------------------------------------------------------------------------------------------------------------


def _show(folder: Path, state: dict[str, Any], as_json: bool) -> None:
    from silodp.core.figures import left_of

    processes = [{"name": name, "pid": pid, "runs": bool(_command(pid)), "ports": _ports(pid)} for name, pid in state["processes"].items()]
    silos = [_budget(name, Path(policy)) for name, policy in state["silos"].items()]
    found = {
        "folder": str(folder), "engine": state["engine"], "connected": _connected(folder, state), "processes": processes, "silos": silos,
        "certificates": _certificates(folder / "engine"),
    }  # fmt: skip
    if as_json:
        print(json.dumps(found))
        return
    table = Table("process", "pid", "runs", "TCP ports", box=None, pad_edge=False)
    for row in processes:
        table.add_row(row["name"], str(row["pid"]), "yes" if row["runs"] else "no", ", ".join(map(str, row["ports"])) or "-")
    out.print(table)
    for certificate in found["certificates"]:
        out.print(f"Certificate of {certificate['subject']}, valid to {certificate['until']}: SHA-256 {certificate['sha256']}")
    for silo in silos:
        out.print(f"{silo['name']}: {silo['records']} records; {left_of(1 - silo['left'])} of epsilon {silo['epsilon']:g} is left.")
    said = ", ".join(found["connected"]) if found["connected"] is not None else "the engine does not answer"
    out.print(f"Connected through {state['engine']}: {said or 'nobody'}.")
    out.print(ONE_USER)


def _connected(folder: Path, state: Mapping[str, Any]) -> list[str] | None:
    from silodp.wire.socket import Unreached

    try:
        return sorted(_carrier(folder, state).names())
    except Unreached:
        return None


def _budget(name: str, policy: Path) -> dict[str, Any]:
    from silodp.silo.ledger.durable import DurableLedger

    card, ledger = json.loads((policy.parent / "silo.json").read_text()), DurableLedger.open(policy.parent / "ledger.db")
    return {"name": name, "records": card["records"], "epsilon": card["epsilon"], "left": 1 - ledger.used(), "policy": str(policy)}


def _certificates(folder: Path) -> list[dict[str, str]]:
    """Every certificate that the engine was provisioned with, once."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    found = {}
    for path in sorted([*folder.rglob("*.crt"), *folder.rglob("*.pem")]) if folder.exists() else ():
        with contextlib.suppress(ValueError, OSError):
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            subject = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
            digest, name = certificate.fingerprint(hashes.SHA256()).hex(), str(subject[0].value) if subject else path.name
            found[digest] = {"subject": name, "until": certificate.not_valid_after_utc.date().isoformat(), "sha256": digest}
    return list(found.values())


def _ports(pid: int) -> list[int]:
    """TCP ports on which the process, or one that it started, listens."""
    listening = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for words in (line.split() for line in Path(table).read_text().splitlines()[1:]):
                if words[3] == "0A":
                    listening[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    ports = set()
    for member in _family(pid):
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{member}/fd").iterdir():
                with contextlib.suppress(OSError):
                    ports.add(listening.get(os.readlink(file)))
    return sorted(port for port in ports if port)


def _family(pid: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


# --- run ----------------------------------------------------------------------------------------------------------------------------


@federation.command()
def run(
    project: Project = None,
    folder: Folder = Path("federation"),
    algorithm: Annotated[str, typer.Option(help="As for `silodp train`: spider, mb-sgd, local-sgd, prox-svrg, ...")] = "spider",
    epsilon: Annotated[float | None, typer.Option(help="What the run may spend at each silo; a silo's whole budget by default.")] = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds R.")] = 25,
    phase: Annotated[int, typer.Option(help="Phase q of spider and diff2: a fresh anchor every q rounds.")] = 5,
    step: Annotated[float, typer.Option(help="Step size.")] = 0.5,
    clip: Annotated[float, typer.Option(help="Clip threshold of a record's whole gradient.")] = 1.0,
    slope: Annotated[float, typer.Option(help="Differences are clipped at slope x the move of w.")] = 1.0,
    local_steps: Annotated[int, typer.Option(help="Noisy local steps a round, for local-sgd and scaffold.")] = 5,
    inner: Annotated[int, typer.Option(help="Inner steps of an SVRG epoch.")] = 5,
    restarts: Annotated[int, typer.Option(help="Restarts of prox-pl-svrg.")] = 1,
    momentum: Annotated[float, typer.Option(help="Of momentum, and beta_1 of adam.")] = 0.9,
    kappa: Annotated[float, typer.Option(help="Gain of disk's filter.")] = 0.7,
    sampling: Annotated[str | None, typer.Option(help="full or disjoint.")] = None,
    participation: Annotated[str, typer.Option(help="Who is asked in a round: all, uniform:M, random:M or balanced:M.")] = "all",
    anchor_share: Annotated[float | None, typer.Option(help="Share of the budget that anchors take.")] = None,
    seed: Annotated[int, typer.Option(help="Public coins: the start, and who is asked.")] = 0,
    quorum: Annotated[
        int | None, typer.Option(help="Answers without which a round does not count; with fewer the run ends. 1; through a shuffler, all.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds after which a round goes on without whoever is silent.")] = 60.0,
    patience: Annotated[float, typer.Option(help="Seconds that a round waits for the quorum.")] = 300.0,
    retry: Annotated[
        float, typer.Option(help="Seconds after which the same question is sent again; each further time after twice as long.")
    ] = 10.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, or with the latest that has not come to its end.")
    ] = False,
    new: Annotated[bool, typer.Option("--new", help="Start another run although the last one has not come to its end.")] = False,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder; by default a new one in runs/.")] = None,
    hub: Annotated[Path | None, typer.Option(help="The engine's socket, where the silos are on machines of their own.")] = None,
    card: Annotated[list[Path] | None, typer.Option(help="A silo's silo.json, with --hub; once for each silo.")] = None,
    key_file: Annotated[Path | None, typer.Option("--key", help="The server's key, with --hub.")] = None,
    shuffler: Annotated[Path | None, typer.Option(help="The shuffler's shuffler.json, with --hub, if there is one.")] = None,
    model: Annotated[str | None, typer.Option(help="The server's own copy of a model FILE.py:FUNCTION.")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="The server's own copy of the schema, to be sure that the silos' is the same.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train over the silos. Killed at any time, it goes on with --resume, and no silo pays a second time.

    Example: `silodp federation run --algorithm spider --epsilon 3 --rounds 25`
    """
    from silodp.core.figures import EARLY, shown
    from silodp.core.privacy.accounting import rounded_up
    from silodp.server.remote import Timeouts
    from silodp.server.run import Conduct, Order

    given = locals()
    if bool(hub) != bool(card) or bool(hub) != bool(key_file):
        raise BadInput("--hub, --card and --key belong together: give all three, or a --folder that `silodp federation up` made")
    if hub and card and key_file:
        from silodp.wire.hub import Hub

        carrier, cards, signing = Hub(hub), [_card(path) for path in card], _read_key(key_file)
    else:
        folder = folder.resolve()
        state = _load(folder)
        carrier, signing = _carrier(folder, state), _read_key(folder / "asker.key")
        cards = [_card(Path(policy).parent / "silo.json") for policy in state["silos"].values()]
        shuffler = Path(state["shuffler"]).parent / "shuffler.json" if state.get("shuffler") else None
    mixer = shuffle.shuffler_card(shuffler) if shuffler else None
    given |= {"trust": "shuffle" if mixer else "isrl", "least": quorum if mixer else None}
    if resume and new:
        raise BadInput("--resume goes on with a run and --new starts another; give one of them")
    runs = (folder if not hub else Path()) / "runs"
    place = out_dir or (place_of.run_to_resume(runs) if resume else place_of.new_run(runs, anew=new))
    order = _resumed(place) if resume else Order(**{field.name: given[field.name] for field in fields(Order)})
    if not resume and any((place / name).exists() for name in ("run.json", "config.json", "spent.json")):
        raise BadInput(f"{place} holds a run already; go on with it by --resume, or choose another --out")
    waits = Timeouts(deadline=deadline, limit=max(patience, deadline), retry=min(retry, deadline))
    conduct = Conduct(
        cards, _problem(cards[0], model, schema), order, carrier, place, key=signing, quorum=quorum or 1, timeouts=waits, shuffler=mixer,
        held=_show_held if not as_json else lambda held: None,
    )  # fmt: skip
    again = same_command(*(["--resume"] * (not resume)), *(["--out", place] * (not out_dir)), without=("--new",))
    kept = f"what the silos have answered is kept in {place}, and `{again}` goes on with it, without a second price"
    with interruptible(kept):
        _follow(conduct, len(cards), quiet=as_json)
    if as_json:
        print(json.dumps(conduct.summary))
        _exit_early(conduct.summary["ended"])
        return
    for silo in conduct.summary["silos"]:
        missed = ", ".join(f"{code} {times}" for code, times in silo["dropped"].items())
        out.print(
            f"{silo['name']}: answered {silo['answered']} of {conduct.summary['questions']} questions, spent at most epsilon "
            f"{shown(silo['spent_epsilon_at_most'])} of {silo['epsilon']:g} at delta {rounded_up(silo['delta'])}{_against_shuffler(silo)}"
            f"{f'; {missed}' if missed else ''}."
        )
    if "said" in conduct.summary:
        out.print(f"Here {conduct.summary['said']}.")
    ended = conduct.summary["ended"]
    out.print(f"{conduct.summary['iterates']} iterates; {'finished' if ended == 'finished' else f'ended early: {ended}'}.")
    if ended != "finished":
        out.print(EARLY)
    out.print(f"Model, summary and journal are in {place}.")
    _exit_early(ended)


def _show_held(held: Mapping[str, HoldReply]) -> None:
    from silodp.core.privacy.accounting import rounded_up

    shares = ", ".join(f"{name} {rounded_up(100 * (reply.needed or 0.0), 1, 'f')} %" for name, reply in held.items())
    out.print(f"Held for the run, of each silo's budget: {shares}. It is spent question by question; what is not is released at the end.")


def _exit_early(ended: str) -> None:
    """Exit code 3 for a run that has a model but did not come to its end."""
    if ended != "finished":
        raise typer.Exit(3)


def _against_shuffler(silo: Mapping[str, Any]) -> str:
    from silodp.core.figures import shown

    if "local_epsilon_at_most" not in silo:
        return ""
    local = silo["local_epsilon_at_most"]
    return " against the server, " + (
        f"{shown(local)} against the shuffler itself" if local is not None else "no bound against the shuffler itself"
    )


def _follow(conduct: Any, silos: int, *, quiet: bool) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    said = TextColumn("{task.fields[said]}")
    with Progress(TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), said, disable=quiet, console=out) as bar:
        task = bar.add_task("rounds", total=conduct.total, said="")
        for told in conduct:
            left = min(told.left.values())
            words = f"{len(told.answered)}/{silos} silos answered, {max(left, 0.0):.0%} of the run's budget left"
            words += "".join(f", {name} {code}" for name, code in told.dropped.items()) + (" (replayed)" if told.replayed else "")
            bar.update(task, completed=min(told.iterate, conduct.total), said=words)


def _resumed(place: Path) -> Order:
    from silodp.server.run import Order

    try:
        return Order(**json.loads((place / "run.json").read_text())["order"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{place} holds no run to go on with; give its folder with --out") from None


def _problem(card: Card, model: str | None, schema: Path | None = None) -> Problem:
    """The problem that the card names; a model in a file must be this server's own copy of it."""
    from silodp.core.problem.models import model_by_name
    from silodp.core.problem.problem import Problem
    from silodp.core.problem.prox import by_name
    from silodp.core.problem.schema import Schema
    from silodp.core.problem.task import Task

    if schema and Schema.load(schema).text != card.schema:
        raise BadInput(f"the schema {schema} is not the one that silo {card.name} reads its file by; use one and the same file")
    read_by = Schema.parse(card.schema, f"the card of {card.name}") if card.schema else None
    if read_by and (read_by.features, read_by.label.classes) != (card.features, card.classes):
        raise BadInput(
            f"the card of {card.name} has other features or classes than its schema; take the silo.json that `silodp silo init` wrote"
        )
    task, shape = (read_by.task, read_by.shape) if read_by else (Task.plain(len(card.classes)), ())
    named = read_by.hash if read_by else ""
    path, _, function = (model or card.model).rpartition(":")
    if not path.endswith(".py"):
        made = model_by_name(model or card.model, len(card.features), task, shape)
        return Problem(*made, by_name(card.prox), schema=named)
    if model is None:  # what a card names is not run, even if such a file is here
        raise BadInput(f"the silos' model is {card.model}; give this server's own copy of it with --model FILE.py:FUNCTION")
    import runpy

    outputs, loss = task.head()
    try:
        built = runpy.run_path(path)[function](len(card.features), outputs)
    except Exception as error:  # whatever somebody has written there
        raise BadInput(
            f"model {model} cannot be used ({type(error).__name__}); give FILE.py:FUNCTION, called with (features, outputs)"
        ) from None
    return Problem(built, loss, by_name(card.prox), schema=named)


# --- files --------------------------------------------------------------------------------------------------------------------------


def _carrier(folder: Path, state: Mapping[str, Any]) -> Carrier:
    from silodp.wire.hub import Direct, Hub

    if state["engine"] == "direct":
        return Direct(shuffle.sites(folder, state))
    return Hub(folder / "engine" / "hub.sock")


def _card(path: Path) -> Card:
    from silodp.server.remote import Card

    try:
        return Card.of(json.loads(path.read_text("utf-8")), str(path))
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"the card {path} cannot be read ({type(error).__name__}); give the silo.json of a silo") from None


def _save(folder: Path, state: dict[str, Any], name: str = "federation.json") -> None:
    part = folder / f"{name}.part"
    part.write_text(json.dumps(state, indent=1) + "\n")
    part.replace(folder / name)


def _load(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder.resolve() / "federation.json").read_text())
    except (OSError, ValueError):
        raise BadInput(f"no federation runs from {folder}; `silodp federation up --folder {folder}` starts one") from None


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise BadInput(f"{path} cannot be made: {error.strerror}; nothing is ever written over") from None


def _new_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    made = Ed25519PrivateKey.generate()
    with _new_file(path) as file:
        file.write(made.private_bytes_raw().hex() + "\n")
    return made


def _read_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text("ascii").strip()))
    except (OSError, ValueError):
        raise BadInput(f"the key {path} cannot be read; `silodp federation key` makes one of 64 hexadecimal digits") from None
