"""Functions for the sites of every engine on one machine: a free port, and processes that continue
after their starter has ended and are identified by their folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from silodp.core.text import visible
from silodp.host import metrics
from silodp.host.atomic import write
from silodp.host.certificates import certificates, expiring
from silodp.wire.hub import Hub
from silodp.wire.socket import Unreached

_CHILDREN: dict[int, subprocess.Popen] = {}


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connected(folder: Path, hub: Path | None = None) -> list[str] | None:
    """Return the silos that are connected to the hub of the folder, or to another hub. Return None
    if no hub answers.
    """
    with contextlib.suppress(Unreached):
        return Hub(hub or folder / "hub.sock").names()
    return None


def warn(folder: Path) -> None:
    """Print a warning to standard error for each certificate of a site that expires soon."""
    for sentence in expiring(folder):
        print(visible(f"warning: {sentence}"), file=sys.stderr, flush=True)


def watched(role: str, folder: Path) -> None:
    """Report to monitoring from now on: that this process runs, and how long the folder's
    certificates are valid.
    """

    def look() -> None:
        if listed := certificates(folder):
            days = min(certificate["days"] for certificate in listed)
            metrics.gauge("silodp_certificate_days", days)

    metrics.report_forever(role, look)


def attended(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a child process, and return its exit code.

    The child ends with this process, and gets the SIGTERM that this process gets.
    """
    child = subprocess.Popen(words, env=environment, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, also by SIGKILL."""
    # 1 is PR_SET_PDEATHSIG. With it, kill -9 of a courier leaves no process behind.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Processes:
    """The engine's processes of one folder. Each leads a process group of its own, and writes to
    NAME.log in the folder.

    processes.json has the pid of each process and the time at which it began. The time
    distinguishes it from a later process with the same pid.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "processes.json"

    def started(self) -> dict[str, tuple[int, str]]:
        """Return pid and time of each process, by its name."""
        with contextlib.suppress(FileNotFoundError):
            return {
                name: (pid, born)
                for name, (pid, born) in json.loads(self._file.read_text()).items()
            }
        return {}

    def pids(self) -> dict[str, int]:
        """Return the pid of each process, by its name."""
        return {name: pid for name, (pid, _) in self.started().items()}

    def runs(self, name: str) -> bool:
        """Return whether the process of this name still runs."""
        pid, born = self.started().get(name, (0, ""))
        return bool(pid) and _born(pid) == born

    def start(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        *,
        within: Path | None = None,
    ) -> int:
        """Start a process, record it, and return its pid. `within` is its current folder."""
        with open(
            os.open(self._folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            "ab",
        ) as log:
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=within,
            )
        _CHILDREN[process.pid] = process
        write(
            self._file,
            json.dumps(self.started() | {name: (process.pid, _born(process.pid))}, indent=2) + "\n",
        )
        return process.pid

    def end(self, names: Iterable[str], grace: float) -> None:
        """End these processes and their groups. Each has `grace` seconds to end by itself."""
        alive = {self.started()[name][0] for name in names if self.runs(name)}
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 60.0)):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, number)
            deadline = time.monotonic() + seconds
            while (
                alive := {pid for pid in alive if group_runs(pid)}
            ) and time.monotonic() < deadline:
                time.sleep(0.05)

    def forget(self) -> None:
        """Delete the record and the hub's socket, after all processes have ended."""
        for leftover in (self._file, self._folder / "hub.sock"):
            leftover.unlink(missing_ok=True)


def group_runs(pid: int) -> bool:
    """Return whether any process of the group that this process leads still runs."""
    # A child of ours that has ended is collected here, or its group would seem to run.
    _born(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False


def _born(pid: int) -> str:
    """Return when the process began, or an empty text if it has ended."""
    if (child := _CHILDREN.get(pid)) and child.poll() is not None:
        del _CHILDREN[pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A process in the state Z has ended, and waits for its parent.
        if fields[0] != "Z":
            return fields[19]
    return ""
