"""The processes of a federation on this machine: gates, a shuffler, and an engine's own. They are
started, found again, and stopped here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.cli import federation_shuffle as shuffle
from silodp.cli.federation_files import RUNS, STOPPED, load_state, save_state
from silodp.core.errors import BadInput
from silodp.host.python_path import child_environment
from silodp.wire.hub import Direct


def site_of(engine: str) -> Any:
    """Return the engine's own module, or None for direct. Raise BadInput if the engine is not
    installed.

    The module has provision(folder, silos), start(folder, sockets) -> {name: pid}, and
    stop(folder).
    """
    if engine == "direct":
        return None
    try:
        return importlib.import_module(f"silodp.wire.{engine}.site")
    except ModuleNotFoundError as error:
        raise BadInput(
            f"engine {engine} is not installed ({error.name}); install silodp[{engine}], "
            "or use --engine direct"
        ) from None


def launch_gates(folder: Path, state: dict[str, Any]) -> dict[str, subprocess.Popen]:
    """Start every gate, and the shuffler if there is one. Return without waiting for them.

    The folder has their pids as soon as they are started.
    """
    (folder / "logs").mkdir(mode=0o700, exist_ok=True)
    environment = child_environment()
    if state["registry"]:
        environment["SILODP_STATE"] = state["registry"]
    started: dict[str, subprocess.Popen] = {}
    state["processes"] = {}
    for name, (words, settings) in shuffle.daemons(state).items():
        with open(folder / "logs" / f"{name.replace(' ', '-')}.txt", "ab") as log:
            command = [sys.executable, "-P", "-m", "silodp.cli", *words, settings]
            started[name] = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        state["processes"][name] = started[name].pid
        save_state(folder, state)
    return started


def await_gates(
    folder: Path, state: dict[str, Any], started: Mapping[str, subprocess.Popen]
) -> None:
    """Wait until all of them listen. Raise BadInput with the last line of one that has ended."""
    gates = Direct(shuffle.sites(folder, state))
    deadline = time.monotonic() + 600
    while len(gates.names()) < len(started):
        for name, process in started.items():
            if process.poll() is not None:
                lines = (
                    (folder / "logs" / f"{name.replace(' ', '-')}.txt")
                    .read_text()
                    .strip()
                    .splitlines()
                )
                why = "its log is empty"
                if lines:
                    why = lines[-1].removeprefix("silodp: ")
                raise BadInput(f"the {name} did not start: {why}")
        if time.monotonic() > deadline:
            raise BadInput(
                f"the gates did not start within ten minutes; read the files in {folder / 'logs'}"
            )
        time.sleep(0.1)


def stop_all(folder: Path) -> list[int]:
    """End the engine's processes, and the gates that still belong to this federation. Return the
    pids of gates that did not end.
    """
    state = load_state(folder)
    if site := site_of(state["engine"]):
        with contextlib.suppress(FileNotFoundError):
            site.stop(folder / "engine")
    known = shuffle.daemons(state)
    gates = {pid: known[name][1] for name, pid in state["processes"].items() if name in known}
    pids = [pid for pid, policy in gates.items() if policy in command_of(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 300
    while (
        left := [pid for pid in pids if gates[pid] in command_of(pid)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not left:
        save_state(folder, state | {"processes": {}}, name=STOPPED)
        (folder / RUNS).unlink()
    return left


def command_of(pid: int) -> list[str]:
    """Return the words that started the process, or none if it has ended."""
    try:
        return [
            word
            for word in Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .decode(errors="replace")
            .split("\0")
            if word
        ]
    except OSError:
        return []


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports on which the process, or one that it started, listens."""
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
