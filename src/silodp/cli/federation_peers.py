"""`silodp federation run --peers`: train without a server. Each silo's own process trains, and a
relay carries replies between them.

With `--as NAME` the command is the process of that silo, on any machine. Without it, the command
starts one process for each silo of this machine's federation, each with its own gate's socket and
the relay's folder. It compares the models at the end. The run's folder then has peers.json (the
run's id, the silos, the words of the command), relay/, and a run folder for each silo.
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
"""Seconds for the other peers to end by themselves after one has failed."""
PEER_NEEDS = (
    "--as NAME needs --gate, the silo's own socket, --relay, the folder that all peers share, "
    "and --run-id"
)
NO_TOTALS = (
    "a shuffler sends its totals to one reader, but there are several peers; leave out "
    "--peers, or the shuffler"
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
    """Return the carrier of this silo's process. Raise BadInput if an option is missing or
    wrong.
    """
    from silodp.server.peers import Folder, Peer

    if gate is None or relay is None or run is None:
        raise BadInput(PEER_NEEDS)
    if name not in {card.name for card in cards}:
        raise BadInput(
            f"--as is {name!r}; it must be one of the cards' silos: "
            f"{', '.join(card.name for card in cards)}"
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", run):
        raise BadInput(
            f"--run-id is {run!r:.80}; it must be at most 64 letters, digits, - and _, "
            "equal at all peers and new for each run"
        )
    if quorum not in (None, len(cards)):
        raise BadInput(
            f"--quorum is {quorum}; among peers every queried silo must answer; leave it out"
        )
    # As at Ctrl-C, the reservation at the gate is released.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return Peer(name, Direct({name: gate}), Folder(relay))


# --- all of them on this machine -----------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """The end of one peer's process: its exit code (below 0: the signal), its last line on standard
    error, and its summary if it has a model.
    """

    name: str
    code: int
    last: str
    summary: Mapping[str, Any] | None


def run_peers(
    folder: Path, *, resume: bool, new: bool, out_dir: Path | None, relay: Path | None
) -> dict[str, Any]:
    """Start a peer for each silo and wait for all of them.

    Return a run's summary of their results, with "ended". Raise BadInput if there is no model.
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
    """Return the content of peers.json. For a new run, write it first."""
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
            f"{place} contains no run of these peers to resume; give its folder with --out"
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
    words = [sys.executable, "-P", "-m", "silodp.cli", "federation", "run"]
    if not begun:
        words += about["words"]
    words += about["now"]
    words += ["--json", "--as", name]
    words += ["--gate", str(gate)]
    words += ["--relay", str(relay)]
    words += ["--run-id", about["run"]]
    words += ["--out", str(place / name)]
    words += ["--key", str(folder / "asker.key")]
    if begun:
        words.append("--resume")
    for silo in about["silos"]:
        words += ["--card", str(folder / "silos" / silo / "silo.json")]
    return words


def _wait(started: Mapping[str, subprocess.Popen]) -> None:
    """Wait until all have ended, or until the others' time is over after one has failed."""
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
    last = ""
    if errors.strip():
        last = errors.strip().splitlines()[-1].removeprefix("silodp: ")
    if process.returncode < 0:
        last = f"its process was killed by signal {-process.returncode}"
    summary = None
    if process.returncode in (0, 3):
        summary = json.loads(out)
    return Ended(name, process.returncode, last, summary)


def _together(place: Path, ended: Sequence[Ended], kept: str) -> dict[str, Any]:
    from silodp.server.peers import model_hash

    files = RunFolder(place)
    made = [peer for peer in ended if peer.summary]
    # A peer that was interrupted only followed another peer's failure.
    own = [peer for peer in ended if peer.code not in (0, 3, 130)]
    if not made:
        first = (own or list(ended))[0]
        begun = any(RunFolder(place / peer.name).description.exists() for peer in ended)
        if not begun:  # The run was refused: no query was sent, and no files are needed.
            shutil.rmtree(place, ignore_errors=True)
            raise BadInput(first.last)
        raise BadInput(f"{first.name}: {first.last}; {kept}")
    hashes = {peer.name: model_hash(RunFolder(place / peer.name).model) for peer in made}
    whole = all(peer.code == 0 for peer in ended)
    if whole and len(set(hashes.values())) > 1:
        digests = ", ".join(f"{name} {digest[:12]}.." for name, digest in hashes.items())
        raise BadInput(
            f"the peers' models differ ({digests}), because a silo has signed two answers "
            "to the last question; use none of these models"
        )
    longest = max(
        (peer.summary for peer in made if peer.summary), key=lambda summary: summary["questions"]
    )
    reasons = [f"{peer.name}: {_reason(peer)}" for peer in ended if peer.code]
    summary = dict(longest) | {"ended": "; ".join(reasons) or "finished", "models": hashes}
    if whole:
        shutil.copyfile(RunFolder(place / ended[0].name).model, files.model)
        summary["model"] = str(files.model)
    write(files.result, json.dumps(summary, indent=1) + "\n", mode=0o644)
    return summary


def _reason(peer: Ended) -> str:
    if peer.summary:
        return peer.summary["ended"]
    return peer.last


def same_models(summary: Mapping[str, Any]) -> str:
    """Return a sentence that compares the peers' models."""
    hashes = summary["models"]
    if len(set(hashes.values())) == 1 and len(hashes) == len(summary["silos"]):
        return f"All {len(hashes)} peers' models are equal: SHA-256 {next(iter(hashes.values()))}."
    return (
        f"{len(hashes)} of {len(summary['silos'])} peers have a model, and not all "
        "models are of the same iterate. Use none of them before --resume."
    )
