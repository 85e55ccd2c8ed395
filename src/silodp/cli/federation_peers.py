"""`silodp federation run --peers`: no server. Each silo's own process trains, and a relay carries
replies from one to the other.

With `--as NAME` the command is the process of that one silo, wherever it is. Without, it starts one
for each silo of this machine's federation, each with its own gate's socket and the relay's folder,
and compares what they made. The run's folder then has peers.json (the run's id, the silos, the
words of the command), relay/, and a folder for each silo: its run's own.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.cli import federation_folder as place_of
from silodp.cli.federation_files import load_state
from silodp.cli.federation_shuffle import sites
from silodp.cli.interrupted import interruptible
from silodp.core.errors import BadInput
from silodp.host.atomic import write
from silodp.host.python_path import child_environment
from silodp.runs import RunFolder
from silodp.wire.hub import Direct

if TYPE_CHECKING:
    from silodp.core.protocol.card import Card
    from silodp.server.peers import Peer

LEAVE = 10.0
"""Seconds in which the other peers may end by themselves once one has: without it none can go on.
"""
PEER_NEEDS = (
    "--as NAME needs --gate, the silo's own socket, --relay, the folder that all peers share, "
    "and --run-id"
)
NO_TOTALS = (
    "a shuffler's totals have one reader, and peers are many; leave out --peers, or the shuffler"
)
OWN_FLAGS = ("--new", "--resume", "--json")


# --- one silo's process --------------------------------------------------------------------------


def one_peer(
    name: str,
    gate: Path | None,
    relay: Path | None,
    run: str | None,
    cards: Sequence[Card],
    quorum: int | None,
) -> Peer:
    """The carrier of this silo's process; BadInput unless it has what it needs."""
    from silodp.server.peers import Folder, Peer

    if gate is None or relay is None or run is None:
        raise BadInput(PEER_NEEDS)
    if name not in {card.name for card in cards}:
        raise BadInput(
            f"--as is {name!r}, but the cards are of {', '.join(card.name for card in cards)}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", run):
        raise BadInput(
            f"--run-id is {run!r:.80}; it must be at most 64 letters, digits, - and _, the "
            "same at all peers and new for each run"
        )
    if quorum not in (None, len(cards)):
        raise BadInput(
            f"--quorum is {quorum}; among peers every silo that is asked must answer: leave it out"
        )
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: what is held at the gate is released
    return Peer(name, Direct({name: gate}), Folder(relay))


# --- all of them on this machine -----------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How one peer's process ended: its exit code (below 0: the signal), its last word, and its
    summary if it has a model.
    """

    name: str
    code: int
    said: str
    summary: Mapping[str, Any] | None


def run_peers(
    folder: Path, *, resume: bool, new: bool, out_dir: Path | None, relay: Path | None
) -> dict[str, Any]:
    """Starts a peer for each silo and waits for all; what they made, with "ended" as a run's
    summary has it. BadInput without a model.
    """
    state = load_state(folder)
    if state.get("shuffler"):
        raise BadInput(NO_TOTALS)
    place = place_of.place_of_run(out_dir, folder / "runs", resume=resume, new=new).resolve()
    about = _open(place, list(state["silos"]), resume=resume)
    kept = place_of.kept_in(place, resume=resume, given=bool(out_dir))
    sockets = sites(folder, state)
    started: dict[str, subprocess.Popen] = {}
    with interruptible(kept):
        try:
            for name in about["silos"]:
                words = _words(folder, place, about, name, sockets[name], relay or place / "relay")
                started[name] = subprocess.Popen(
                    words,
                    env=child_environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            _wait(started)
        finally:
            _interrupt(started)
        ended = [_ended(name, process) for name, process in started.items()]
    return _together(place, ended, kept)


def _open(place: Path, silos: list[str], *, resume: bool) -> dict[str, Any]:
    """What peers.json says, which a new run gets here."""
    path = RunFolder(place).peers
    words = [word for word in sys.argv[3:] if word not in OWN_FLAGS]
    if resume:
        try:
            about = json.loads(path.read_text())
            if about["silos"] == silos:
                return about | {"now": words}
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise BadInput(
            f"{place} holds no run of these peers to go on with; give its folder with --out"
        )
    place_of.refuse_taken(place)
    place.mkdir(parents=True, exist_ok=True)
    about = {"run": secrets.token_hex(16), "silos": silos, "words": words}
    write(path, json.dumps(about, indent=1) + "\n")
    return about | {"now": []}


def _words(
    folder: Path, place: Path, about: Mapping[str, Any], name: str, gate: Path, relay: Path
) -> list[str]:
    begun = RunFolder(place / name).description.exists()
    words = [
        sys.executable,
        "-P",
        "-m",
        "silodp.cli",
        "federation",
        "run",
        *([] if begun else about["words"]),
        *about["now"],
    ]
    words += [
        "--json",
        "--as",
        name,
        "--gate",
        str(gate),
        "--relay",
        str(relay),
        "--run-id",
        about["run"],
        "--out",
        str(place / name),
    ]
    words += ["--key", str(folder / "asker.key"), *(["--resume"] if begun else [])]
    for silo in about["silos"]:
        words += ["--card", str(folder / "silos" / silo / "silo.json")]
    return words


def _wait(started: Mapping[str, subprocess.Popen]) -> None:
    """Until all have ended, or one has ended early and the others have had their time."""
    deadline = None
    while None in (codes := [process.poll() for process in started.values()]):
        if deadline is None and any(codes):
            deadline = time.monotonic() + LEAVE
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _interrupt(started: Mapping[str, subprocess.Popen]) -> None:
    for process in started.values():
        if process.poll() is None:
            process.terminate()
    for process in started.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def _ended(name: str, process: subprocess.Popen) -> Ended:
    out, errors = process.communicate()
    if errors.strip():
        said = errors.strip().splitlines()[-1].removeprefix("silodp: ")
    else:
        said = ""
    if process.returncode < 0:
        said = f"its process was killed by signal {-process.returncode}"
    return Ended(
        name, process.returncode, said, json.loads(out) if process.returncode in (0, 3) else None
    )


def _together(place: Path, ended: Sequence[Ended], kept: str) -> dict[str, Any]:
    from silodp.server.peers import model_hash

    files = RunFolder(place)
    made = [peer for peer in ended if peer.summary]
    own = [
        peer for peer in ended if peer.code not in (0, 3, 130)
    ]  # whoever was interrupted has only followed another
    if not made:
        first = (own or list(ended))[0]
        if not any(
            RunFolder(place / peer.name).description.exists() for peer in ended
        ):  # refused: nothing was asked, and nothing is left
            shutil.rmtree(place, ignore_errors=True)
            raise BadInput(first.said)
        raise BadInput(f"{first.name}: {first.said}; {kept}")
    hashes = {peer.name: model_hash(RunFolder(place / peer.name).model) for peer in made}
    whole = all(peer.code == 0 for peer in ended)
    if whole and len(set(hashes.values())) > 1:
        said = ", ".join(f"{name} {digest[:12]}.." for name, digest in hashes.items())
        raise BadInput(
            f"the peers' models differ ({said}): a silo has signed two answers to the last "
            "question; use none of these models"
        )
    longest = max(
        (peer.summary for peer in made if peer.summary), key=lambda summary: summary["questions"]
    )
    reasons = [
        f"{peer.name}: {peer.summary['ended'] if peer.summary else peer.said}"
        for peer in ended
        if peer.code
    ]
    summary = dict(longest) | {"ended": "; ".join(reasons) or "finished", "models": hashes}
    if whole:
        shutil.copyfile(RunFolder(place / ended[0].name).model, files.model)
        summary["model"] = str(files.model)
    write(files.result, json.dumps(summary, indent=1) + "\n", mode=0o644)
    return summary


def same_models(summary: Mapping[str, Any]) -> str:
    """What the peers' models have in common, in a sentence."""
    hashes = summary["models"]
    if len(set(hashes.values())) == 1 and len(hashes) == len(summary["silos"]):
        return (
            f"All {len(hashes)} peers' models are the same: SHA-256 {next(iter(hashes.values()))}."
        )
    return (
        f"{len(hashes)} of {len(summary['silos'])} peers have a model, not all of the same "
        "iterate; none is to be used before --resume."
    )
