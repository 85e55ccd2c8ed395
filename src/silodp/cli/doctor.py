"""`silodp doctor`: check whether this machine can run silodp. It reads no record, uses no other
machine, and leaves no file.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import socket
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, dump, out, say
from silodp.core.errors import BadInput
from silodp.core.text import visible
from silodp.host.portable import sync_folder
from silodp.wire.versions import EXTRAS, supported

NEEDED = {
    "cryptography": "43",
    "dp-accounting": "0.6",
    "matplotlib": "3.9",
    "numpy": "1.26",
    "pandas": "2.2",
    "pillow": "11",
    "pyarrow": "16",
    "rich": "13",
    "safetensors": "0.4",
    "scikit-learn": "1.5",
    "scipy": "1.13",
    "threadpoolctl": "3",
    "torch": "2.6",
    "typer": "0.12",
}
ENGINES = {extra: engine for engine, extra in EXTRAS.items()}
PYTHON = (3, 11)
SQLITE = (3, 37, 0)
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
LONGEST_SOCKET = 100
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph", "glusterfs")


@dataclass(frozen=True)
class Finding:
    """One sentence about the machine. `fix` is the remedy where the status is not green."""

    name: str
    status: str
    said: str
    fix: str = ""


def _found(name: str, wrong: str, said: str, fix: str) -> Finding:
    """Return a finding with the status `wrong`, or green if `wrong` is empty."""
    if wrong:
        return Finding(name, wrong, said, fix)
    return Finding(name, "green", said)


def doctor(
    folder: Annotated[Path, typer.Option(help="The folder for ledgers and runs.")] = Path(),
    as_json: Json = False,
) -> None:
    """Check whether this machine can run silodp. Every check is green, yellow (works, but read the
    sentence) or red. Exit code 0, or 1 if any check is red.

    The checks cover Python, torch, the libraries, the engines, the folder's disk and permissions,
    SQLite, the clock, entropy and sockets.

    Examples: `silodp doctor` · `silodp doctor --folder /var/lib/silodp-gate --json`
    """
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give one that exists with --folder")
    findings = [found for check in CHECKS for found in _tried(check, folder)]
    red = any(found.status == "red" for found in findings)
    if as_json:
        dump({"ok": not red, "checks": [asdict(found) for found in findings]})
    else:
        for found in findings:
            out.print(f"{found.status:6}", style=found.status, end="")
            out.print(f" {visible(f'{found.name}: {found.said} {found.fix}'.rstrip())}")
        if red:
            say("At least one check is red. Fix it before you use silodp here.")
        else:
            say("Nothing is red: silodp can run here.")
    raise typer.Exit(int(red))


def _tried(check: Callable[[Path], Iterator[Finding]], folder: Path) -> Iterator[Finding]:
    """Run a check. A check that fails itself is a red finding."""
    try:
        yield from check(folder)
    except Exception as error:
        name = check.__name__.strip("_")
        yield Finding(
            name,
            "red",
            f"the check failed ({type(error).__name__}: {error}).",
            "Report this with the output of `silodp doctor --json`.",
        )


def _python(folder: Path) -> Iterator[Finding]:
    said = f"{sys.version.split()[0]} at {sys.executable}."
    fix = f"Install Python {PYTHON[0]}.{PYTHON[1]} or later."
    yield _found("python", "red" * (sys.version_info < PYTHON), said, fix)


def _libraries(folder: Path) -> Iterator[Finding]:
    wrong = [
        f"{name}>={least}"
        for name, least in NEEDED.items()
        if _numbers(_version(name) or "") < _numbers(least)
    ]
    if wrong:
        said = f"missing or too old: {', '.join(wrong)}."
    else:
        said = f"all {len(NEEDED)} are installed."
    yield _found(
        "libraries",
        "red" * bool(wrong),
        said,
        "Run `pip install {}`.".format(" ".join(f"'{one}'" for one in wrong)),
    )


def _torch(folder: Path) -> Iterator[Finding]:
    import torch

    generator = torch.Generator().manual_seed(0)
    product = torch.randn(8, 8, generator=generator).double()
    if not torch.equal(product @ torch.eye(8).double(), product):
        yield Finding(
            "torch", "red", f"{torch.__version__} multiplies wrongly.", "Install torch again."
        )
        return
    yield Finding(
        "torch",
        "green",
        (
            f"{torch.__version__}; every silo and the server need this version, because "
            "a model is approved with it."
        ),
    )
    words = "none found; everything runs on the CPU."
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name(0)
        words = f"{gpu}; studies use it for data that are large enough."
    yield Finding("gpu", "green", words)


def _extension(folder: Path) -> Iterator[Finding]:
    """Report whether the C code for simulations was built when silodp was installed."""
    from silodp.engine import native

    slower = "Simulations of small networks run in torch and take two to three times as long."
    if os.environ.get("SILODP_NATIVE") == "0":
        off = "the C code is off, because SILODP_NATIVE is 0."
        yield Finding("extension", "yellow", f"{off} {slower}", "To use it, unset SILODP_NATIVE.")
        return
    try:
        library = native.library()
    except BadInput as error:
        yield Finding("extension", "red", f"{error}.", "Unset SILODP_NATIVE.")
        return
    if library is None:
        fix = "Install gcc, then install silodp again. On macOS and Windows there is no C code."
        yield Finding("extension", "yellow", f"the C code was not built. {slower}", fix)
        return
    levels = ", ".join(native.runnable_levels())
    yield Finding("extension", "green", f"the C code was built; this processor runs {levels}.")


def _engines(folder: Path) -> Iterator[Finding]:
    for extra, package in ENGINES.items():
        version = _version(package)
        if version is None:
            fix = f"To use it, run `pip install 'silodp[{extra}]'`."
            yield Finding(
                extra,
                "yellow",
                "not installed; `--engine direct` and simulation need no engine.",
                fix,
            )
        elif not supported(package, version):
            said = f"{package} {version} is not supported."
            yield Finding(extra, "red", said, f"Run `pip install 'silodp[{extra}]'`.")
        else:
            yield Finding(extra, "green", f"{package} {version} is supported.")


def _disk(folder: Path) -> Iterator[Finding]:
    where = folder.resolve()
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".silodp-doctor-") as file:
            start = time.monotonic()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            sync_folder(where)
            took = 1000 * (time.monotonic() - start)
            os.chmod(file.name, 0o600)
            mode = stat.S_IMODE(os.stat(file.name).st_mode)
    except OSError as error:
        yield Finding(
            "disk",
            "red",
            f"{where} cannot be written and synced ({error.strerror}).",
            "Choose another --folder, or change its owner.",
        )
        return
    kind = _filesystem(where)
    if kind in REMOTE:
        fix = "Put ledgers on a local disk. Locks and syncs over a network are not reliable."
        yield Finding(
            "disk", "yellow", f"{where} is on {kind}; a write and sync took {took:.0f} ms.", fix
        )
    elif kind == "tmpfs":
        yield Finding(
            "disk",
            "yellow",
            f"{where} is in memory and is lost at a restart.",
            "Put ledgers on a disk.",
        )
    else:
        yield Finding("disk", "green", f"a write and sync in {where} took {took:.0f} ms.")
    if mode != 0o600:
        fix = "Use a file system that preserves Unix permissions."
        yield Finding("permissions", "red", f"a file created with mode 600 has mode {mode:o}.", fix)
        return
    open_to = stat.S_IMODE(where.stat().st_mode) & 0o022
    if open_to:
        said = "other users can write to it"
    else:
        said = "only its owner can write to it"
    fix = f"For a gate's folder run `chmod 700 {where}`."
    yield _found(
        "permissions", "yellow" * bool(open_to), f"{where} preserves permissions, and {said}.", fix
    )


def _sqlite(folder: Path) -> Iterator[Finding]:
    fix = f"Use a Python built with SQLite {'.'.join(map(str, SQLITE))} or later."
    yield _found(
        "sqlite", "red" * (sqlite3.sqlite_version_info < SQLITE), f"{sqlite3.sqlite_version}.", fix
    )


def _clock(folder: Path) -> Iterator[Finding]:
    now = datetime.now(UTC)
    said = f"{now:%Y-%m-%d %H:%M} UTC"
    if now < EARLIEST:
        yield Finding(
            "clock",
            "red",
            f"{said}, which is earlier than this software.",
            "Set the clock; policies and certificates expire by it.",
        )
    elif _synchronised() is False:
        yield Finding(
            "clock",
            "yellow",
            f"{said}, but no time server synchronises it.",
            "Start chrony, ntpd or systemd-timesyncd.",
        )
    else:
        yield Finding("clock", "green", f"{said}.")


def _entropy(folder: Path) -> Iterator[Finding]:
    try:
        draws = {_draw() for _ in range(4)}
    except BlockingIOError:
        yield Finding(
            "entropy",
            "red",
            "the system has not gathered enough entropy yet.",
            "Wait, or add a hardware source of entropy.",
        )
        return
    repeats = len(draws) < 4
    if repeats:
        said = "the system's random source repeats itself."
    else:
        said = "the system's random source is ready."
    yield _found(
        "entropy",
        "red" * repeats,
        said,
        "Do not run a gate here: repeated noise protects no record.",
    )


def _draw() -> bytes:
    if hasattr(os, "getrandom"):
        return os.getrandom(32, os.GRND_NONBLOCK)
    return os.urandom(32)


def _sockets(folder: Path) -> Iterator[Finding]:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5),
        ):
            pass
        yield Finding("loopback", "green", "a connection to 127.0.0.1 works.")
    except OSError as error:
        yield Finding(
            "loopback",
            "red",
            f"a connection to 127.0.0.1 fails ({error.strerror}).",
            "Bring the loopback interface up.",
        )
    where = folder.resolve()
    if len(os.fsencode(where / "silos/NAME/gate.sock")) > LONGEST_SOCKET:
        yield Finding(
            "sockets",
            "yellow",
            f"the path {where} is too long for a Unix socket in it.",
            "Choose a folder with a shorter path.",
        )
        return
    try:
        with (
            tempfile.TemporaryDirectory(dir=where, prefix=".silodp-doctor-") as home,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.bind(f"{home}/s")
            server.listen()
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(f"{home}/s")
        yield Finding("sockets", "green", "gates can listen in this folder.")
    except OSError as error:
        yield Finding(
            "sockets",
            "red",
            f"a Unix socket cannot be made here ({error.strerror}).",
            "Choose a folder on a local disk.",
        )


CHECKS = (
    _python,
    _libraries,
    _torch,
    _extension,
    _engines,
    _disk,
    _sqlite,
    _clock,
    _entropy,
    _sockets,
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts[:3])


def _filesystem(path: Path) -> str:
    """Return the kind of file system of the path, or "" if the system does not report it."""
    best = ""
    kind = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split()
            inside = mount == "/" or str(path) == mount or str(path).startswith(f"{mount}/")
            if inside and len(mount) >= len(best):
                best = mount
                kind = name
    return kind


def _synchronised() -> bool | None:
    """Return whether the kernel reports a synchronised clock, or None if it does not report a
    state.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: only asks
        if state >= 0:
            return state != 5
    return None
