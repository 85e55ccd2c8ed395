"""What every engine's site does alike on one machine: a free port, and processes that outlive
whoever started them, known by their folder.
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def connected(folder: Path, hub: Path | None = None) -> list[str] | None:
    """The silos that the hub of the folder, or another hub, knows; None where no hub answers."""
    with contextlib.suppress(Unreached):
        return Hub(hub or folder / "hub.sock").names()
    return None


def warn(folder: Path) -> None:
    """Says, on standard error, which certificates of a site expire soon."""
    for sentence in expiring(folder):
        print(visible(f"warning: {sentence}"), file=sys.stderr, flush=True)


def watched(role: str, folder: Path) -> None:
    """From now on this process tells monitoring how it is, and how long the folder's certificates
    last.
    """

    def look() -> None:
        if found := certificates(folder):
            metrics.gauge("silodp_certificate_days", min(one["days"] for one in found))

    metrics.report_forever(role, look)


def attended(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a child that ends with this process, and is told to end when this process is; its exit
    code.
    """
    child = subprocess.Popen(words, env=environment, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: kill -9 of a courier leaves nothing of it behind


class Processes:
    """The engine's processes of one folder, each the leader of a group of its own and with a
    NAME.log there.

    processes.json has pid and time of birth of each, which tell it from a later process of the same
    number.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "processes.json"

    def started(self) -> dict[str, tuple[int, str]]:
        with contextlib.suppress(FileNotFoundError):
            return {
                name: (pid, born)
                for name, (pid, born) in json.loads(self._file.read_text()).items()
            }
        return {}

    def pids(self) -> dict[str, int]:
        return {name: pid for name, (pid, _) in self.started().items()}

    def runs(self, name: str) -> bool:
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
        """Afterwards none of these and none of their groups runs; each has so many seconds to end
        by itself.
        """
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
        """The last word, once all have ended."""
        for leftover in (self._file, self._folder / "hub.sock"):
            leftover.unlink(missing_ok=True)


def group_runs(pid: int) -> bool:
    """Whether any process of the group that this one leads runs."""
    _born(pid)  # takes note of its end, if it is a child of ours
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False


def _born(pid: int) -> str:
    """When the process began; empty when it has ended."""
    if (child := _CHILDREN.get(pid)) and child.poll() is not None:
        del _CHILDREN[pid]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""
