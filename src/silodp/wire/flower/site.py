"""The processes of a Flower federation: those of the server's operator, those of a silo's operator,
and all of them on one machine.

Flower is used by its commands: flower-superlink, flower-supernode, flower-superexec and flwr. A
server's folder has ca.pem, ca.key, server.pem, server.key, the secret of its workers, SuperLink's
database, and the silos' signatures for the app. A silo's folder has ca.pem, node.key, its own
secret and trusted.yaml. `python -P -m silodp.wire.flower.site --help` lists the commands for
separate machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from silodp.core.errors import BadInput
from silodp.core.text import visible
from silodp.host.atomic import write
from silodp.host.python_path import child_environment, safe_children
from silodp.wire.flower import front
from silodp.wire.flower.bundle import SPEC, bundle, verification
from silodp.wire.flower.keys import certify, key
from silodp.wire.site import Processes, connected, die_with_parent, free_port, warn
from silodp.wire.tunnel import tunnel
from silodp.wire.versions import check

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "PYTHONSAFEPATH": "1",
}
"""No telemetry, no search for updates, no installation of packages for a server, a short pause
between two searches for work, and no code from the current folder.
"""
SIGNATURES = "signatures"
"""The folder of a server's site with each silo's signature for the app."""
NODES = "nodes"
"""The folder of a server's site with the number of each silo's node, by which Flower's command
removes it.
"""
SIGNS = {
    "certificate has expired": "The server's certificate has expired.",
    "certificate is not yet valid": "The server's certificate is not valid yet, or this machine's clock is slow.",  # noqa: E501
    "certificate verify failed": "The server's certificate was not issued by the CA in ca.pem, or is for another host.",  # noqa: E501
    "code: 2001": (
        "This node has no key, and the server admits only nodes whose keys its operator registered."
    ),
    "code: 2004": (
        "The server does not know this node's key, or the node is still taken to be connected "
        "(for at most a minute)."
    ),
    "Invalid SuperNode authentication": (
        "The server does not accept this node's signature: another key, or a clock that is wrong."
    ),
    "Connection refused": "Nothing listens at the server's address.",
}


PATIENCE = 60.0
"""Seconds in which a SuperLink that was just started begins to listen."""
GRACE = 10.0
"""Seconds in which a process must end after SIGTERM."""
AGAIN = 3.0
"""Seconds before a node that was refused is started again."""
CRASHED = 120.0
"""Seconds in which a refused node is tried again. SuperLink notices within a minute that a node has
crashed.
"""


def explain(log: str) -> str:
    """Return one sentence about why the server, or the node, refused the other. Return an empty
    text if the log has no known reason.
    """
    return next((sentence for sign, sentence in SIGNS.items() if sign.lower() in log.lower()), "")


# --- keys and certificates -----------------------------------------------------------------------


def provision(
    folder: Path, silos: Sequence[str], *, host: str = "localhost", port: int = 0, days: int = 365
) -> None:
    """Make a server's folder (`folder/server`) and one for each silo (`folder/silos/NAME`), with
    keys, for start() or for shipping.

    Raise BadInput for names that cannot be used.
    """
    if len(set(silos)) < len(silos) or not all(
        re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,30}", name) for name in silos
    ):
        raise BadInput(
            f"silos: {list(silos)!r} must be different names of small letters, digits, - "
            "and _, at most 31 long"
        )
    if "server" in silos:
        raise BadInput("silos: server is the name of the server's process; choose another name")
    server = folder / "server"
    for name in (SIGNATURES, NODES):
        (server / name).mkdir(parents=True)
    server.chmod(0o700)
    certify(server, host, days)
    write(server / "secret", secrets.token_bytes(32))
    write(server / "port", str(port or free_port()).encode())
    for name in silos:
        home = folder / "silos" / name
        key(home)
        write(home / "ca.pem", (server / "ca.pem").read_bytes())
        _accept_signature(server, name, home / "node.pub")


# --- the server's operator -----------------------------------------------------------------------


def server(folder: Path, host: str, hub: Path) -> int:
    """Run SuperLink, the worker of its runs and the front door, until SIGTERM. Return 1 if one of
    them ends before.

    A run is begun whenever the hub does not answer: at the start, after the relay was killed, and
    when a silo's signature was added.
    """
    warn(folder)
    store = _app_store(folder)
    inner = free_port()
    ca = folder / "ca.pem"
    write(folder / "superlink.port", str(inner).encode())
    place = folder / "line.sock"
    environment = (
        child_environment()
        | QUIET
        | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_SUPERGRID_API_URL": f"http://127.0.0.1:{store}",
            "PATH": _path(),
            "SILODP_SITE": str(folder),
            "SILODP_LINE": str(place),
            "SILODP_HUB": str(hub),
        }
    )
    secret = f"--superexec-auth-secret-file={folder / 'secret'}"
    _connection(folder)
    superlink = _child(
        [
            *("flower-superlink", "--host=127.0.0.1", f"--port={inner}"),
            *(f"--database={folder / 'superlink.db'}", "--enable-supernode-auth"),
            *(f"--ssl-certfile={folder / 'server.pem'}", f"--ssl-keyfile={folder / 'server.key'}"),
            *(f"--ssl-ca-certfile={ca}", "--isolation=process", secret),
        ],
        environment,
    )
    runtime = f"--runtime-api-address=127.0.0.1:{inner}"
    worker = ["flower-superexec", runtime, f"--root-certificates={ca}", secret]
    children = [superlink, _child(worker, environment)]
    door = front.serve(folder, host, _port(folder), inner, place)
    threading.Thread(target=lambda: _ended_by(asyncio.run, door), daemon=True).start()
    return _attend(children, lambda ending: _begin_run(folder, hub, environment, ending))


def _begin_run(
    folder: Path, hub: Path, environment: Mapping[str, str], ending: threading.Event
) -> None:
    """Begin a run of the app unless the hub answers. Wait until it answers, or until `ending`."""
    if connected(hub.parent, hub) is not None or not _accepts(_inner(folder)):
        return
    done = _flwr(folder, "run", SPEC, "fed", environment=environment)
    if done.returncode:
        print(visible(f"no run: {done.stdout[-500:]}"), file=sys.stderr, flush=True)
    deadline = time.monotonic() + PATIENCE
    while not done.returncode and connected(hub.parent, hub) is None:
        if ending.wait(0.2) or time.monotonic() > deadline:
            return


def register(folder: Path, silos: Mapping[str, Path]) -> None:
    """Admit the nodes with these keys (silo -> its node.pub), each under its silo's name.

    A key that is admitted already stays as it is. After a new signature the server begins its run
    again. Raise BadInput if SuperLink refuses a node.
    """
    words = ("supernode", "register")
    processes = {
        name: _start_flwr(folder, *words, str(file), "fed", "--name", name, "--format", "json")
        for name, file in silos.items()
    }
    for name, process in processes.items():
        printed = process.communicate()[0]
        if match := re.search(r'"node-id": "?(\d+)', printed):
            write(folder / NODES / name, match[1])
        elif "already in use" not in printed:
            reason = explain(printed) or printed.strip()[-300:]
            raise BadInput(f"SuperLink refuses {name}: {reason}")
        _accept_signature(folder, name, silos[name])


def unregister(folder: Path, silos: Sequence[str]) -> None:
    """Have the server admit the nodes of these names no longer. Nothing changes for the others.

    Raise BadInput for an unknown silo, or if SuperLink refuses.
    """
    nodes = {file.name: file.read_text() for file in (folder / NODES).iterdir()}
    if unknown := sorted(set(silos) - set(nodes)):
        raise BadInput(
            f"SuperLink has no silo {unknown[0]!r}; it has {', '.join(sorted(nodes)) or 'none'}"
        )
    for name in silos:
        process = _start_flwr(folder, "supernode", "unregister", nodes[name], "fed")
        printed = process.communicate()[0]
        if process.returncode:
            raise BadInput(f"SuperLink refuses: {explain(printed) or printed.strip()[-300:]}")
        (folder / NODES / name).unlink()


def _accept_signature(folder: Path, name: str, public_key: Path) -> None:
    """Store the silo's signature for the app, which is the comment of its public key. Raise
    BadInput if there is none.
    """
    words = public_key.read_text().split()
    try:
        signature = json.dumps(verification(words[2]))
    except (LookupError, ValueError):
        raise BadInput(
            f"{public_key}: has no signature of the app in its comment; the silo makes the file by "
            "`python -P -m silodp.wire.flower.site key FOLDER`"
        ) from None
    # The time of the folder restarts the run, so an unchanged file is not written.
    stored = folder / SIGNATURES / f"{name}.json"
    if not stored.exists() or stored.read_text() != signature:
        write(stored, signature)


def _app_store(folder: Path) -> int:
    """Serve the app and the silos' signatures to SuperLink, on this machine. Return the port.

    SuperLink takes signatures of an app only from an app store. The address of that store is a
    setting.
    """

    class Store(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            files = sorted((folder / SIGNATURES).glob("*.json"))
            signatures = [json.loads(file.read_text()) for file in files]
            address = f"http://127.0.0.1:{store.server_port}/app"
            self._give(json.dumps({"fab_url": address, "verifications": signatures}).encode())

        def do_GET(self) -> None:
            self._give(bundle())

        def _give(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    store = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    return store.server_port


def _connection(folder: Path) -> None:
    """Write the settings by which `flwr` finds this SuperLink."""
    home = folder / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    settings = [
        "[superlink]",
        'default = "fed"',
        "[superlink.fed]",
        f'address = "127.0.0.1:{_inner(folder)}"',
        f"root-certificates = {json.dumps(str(folder / 'ca.pem'))}",
    ]
    write(home / "config.toml", "\n".join(settings) + "\n")


def _start_flwr(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start Flower's command `flwr` for the server of this folder."""
    settings = {"FLWR_HOME": str(folder / "home"), "PATH": _path()}
    return subprocess.Popen(
        [_program("flwr"), *words],
        env=environment or (child_environment() | QUIET | settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _flwr(
    folder: Path, *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Flower's command `flwr`, and return what it printed with its exit code."""
    process = _start_flwr(folder, *words, environment=environment)
    printed = process.communicate()[0]
    return subprocess.CompletedProcess(process.args, process.returncode, printed, "")


# --- a silo's operator ---------------------------------------------------------------------------


def silo(folder: Path, superlink: str, gate: Path, proxy: str | None = None) -> int:
    """Run a SuperNode and its worker until SIGTERM. Return 1 if one of them ends before. The app
    carries frames to the gate's socket.

    A node that was connected before, and is refused, is tried again for a while. After a crash
    SuperLink counts the node as connected for a minute.
    """
    # A tunnel begins at this machine's own address. The server's certificate is valid for it too.
    if proxy:
        superlink = tunnel(superlink, proxy)
    secret = f"--superexec-auth-secret-file={folder / 'secret'}"
    environment = (
        child_environment()
        | QUIET
        | {
            "FLWR_HOME": str(folder / "home"),
            "PATH": _path(),
            "SILODP_SITE": str(folder),
            "SILODP_GATE": str(gate),
            "SILODP_LINE": superlink,
            "SILODP_CA": str(folder / "ca.pem"),
        }
    )
    warn(folder)
    log = folder / "node.log"
    deadline = time.monotonic() + CRASHED
    was_connected = log.exists() and "SuperNode ID" in log.read_text()
    while True:
        port = free_port()
        with log.open("w") as out:
            node = _child(
                [
                    *("flower-supernode", f"--superlink={superlink}", secret),
                    *(f"--root-certificates={folder / 'ca.pem'}", "--isolation=process"),
                    *("--host=127.0.0.1", f"--port={port}"),
                    f"--auth-supernode-private-key={folder / 'node.key'}",
                    f"--trusted-entities={folder / 'trusted.yaml'}",
                ],
                environment,
                out,
            )
        runtime = f"--runtime-api-address=127.0.0.1:{port}"
        worker = _child(["flower-superexec", "--insecure", runtime, secret], environment)
        status = _attend([node, worker], lambda ending: None)
        reason = explain(log.read_text())
        if status:
            print(visible(reason or f"the node ended: see {log}"), flush=True)
        again = was_connected and "does not know" in reason and time.monotonic() < deadline
        if not status or not again:
            return status
        time.sleep(AGAIN)


# --- all of it on one machine --------------------------------------------------------------------


def start(folder: Path, sockets: Mapping[str, Path], *, patience: float = 600.0) -> dict[str, int]:
    """Start the server and a courier for each silo. Return the pid of each process by name once all
    silos are connected to the hub at folder/hub.sock.

    Each process leads a process group, and writes to folder/NAME.log. Raise BadInput if a process
    ends, or if the silos are not connected in time.
    """
    folder = folder.absolute()
    deadline = time.monotonic() + patience
    if len(str(folder / "server" / "line.sock")) > 107:
        raise BadInput(
            f"{folder}: the path is too long for a socket in it; at most 90 characters will do"
        )
    if missing := [name for name in sockets if not (folder / "silos" / name / "node.key").exists()]:
        raise BadInput(f"{folder}: silo {missing[0]} was not provisioned there")
    if find_spec("flwr") is None:
        raise BadInput("Flower is not installed; pip install 'silodp[flower]' installs it")
    home = folder / "server"
    _spawn_server(folder)
    _await(lambda: _accepts(_inner(home)), folder, ["server"], deadline)
    register(home, {name: folder / "silos" / name / "node.pub" for name in sockets})
    for name, gate in sockets.items():
        start_silo(folder, name, gate)
    names = ["server", *sockets]
    _await(lambda: set(sockets) <= set(connected(folder) or ()), folder, names, deadline)
    return Processes(folder).pids()


def start_silo(folder: Path, name: str, gate: Path) -> int:
    """Start one silo's courier, for the first time or after it was killed. Return its pid."""
    return _spawn(
        folder.absolute(),
        name,
        "silo",
        folder.absolute() / "silos" / name,
        f"--superlink=127.0.0.1:{_port(folder / 'server')}",
        f"--gate={Path(gate).absolute()}",
    )


def restart_server(folder: Path, *, patience: float = 600.0) -> int:
    """Start the server again with its database. Return its pid once the hub answers.

    Nodes reconnect by themselves.
    """
    folder = folder.absolute()
    deadline = time.monotonic() + patience
    Processes(folder).end(["server"], GRACE)
    pid = _spawn_server(folder)
    _await(lambda: connected(folder) is not None, folder, ["server"], deadline)
    return pid


def stop(folder: Path) -> None:
    """End every process that start() began. The server ends last, so that nodes can sign off."""
    processes = Processes(folder.absolute())
    couriers = [name for name in processes.started() if name != "server"]
    for names in (couriers, ["server"]):
        processes.end(names, GRACE)
    processes.forget()


def _spawn_server(folder: Path) -> int:
    """Start the server's process, and return its pid."""
    (folder / "server" / "superlink.port").unlink(missing_ok=True)
    return _spawn(folder, "server", "server", folder / "server", f"--hub={folder / 'hub.sock'}")


def _spawn(folder: Path, name: str, command: str, home: Path, *arguments: str) -> int:
    """Start a command of this module as a process of the folder, and return its pid."""
    words = [sys.executable, "-P", "-m", "silodp.wire.flower.site", command, str(home), *arguments]
    environment = child_environment() | QUIET | {"OMP_NUM_THREADS": "1"}
    return Processes(folder).start(name, words, environment, within=home)


def _child(
    words: Sequence[str], environment: Mapping[str, str], out: IO[str] | None = None
) -> subprocess.Popen:
    """Start one of Flower's programs, which ends with this process."""
    return subprocess.Popen(
        [_program(words[0]), *words[1:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT if out else None,
        preexec_fn=die_with_parent,
    )


def _attend(children: Sequence[subprocess.Popen], look: Callable[[threading.Event], None]) -> int:
    """Wait until SIGTERM, and return 0, or until a child ends, and return 1. Call `look` now and
    then.

    Afterwards no child runs.
    """
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    while not ending.is_set() and all(child.poll() is None for child in children):
        look(ending)
        ending.wait(0.5)
    for child in children:
        child.terminate()
    deadline = time.monotonic() + GRACE
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.wait()
    return 0 if ending.is_set() else 1


def _ended_by(run: Callable[..., object], work: object) -> None:
    """Run it, and end this process after it. Without a front door no node can connect."""
    try:
        run(work)
    except OSError as error:
        print(f"the front door cannot be opened: {error}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _program(name: str) -> str:
    """Return the path of a command of this environment."""
    return str(Path(sys.executable).parent / name)


def _path() -> str:
    """Return PATH with this environment's commands first, because Flower starts its own commands by
    name.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _await(ready: Callable[[], bool], folder: Path, names: Sequence[str], deadline: float) -> None:
    """Wait until it is ready. Raise BadInput if one of the processes ends, or after the
    deadline.
    """
    processes = Processes(folder)
    while not ready():
        for name in names:
            if not processes.runs(name):
                log = folder / f"{name}.log"
                reason = explain(log.read_text()) or f"see {log}"
                raise BadInput(f"{name} ended at once: {reason}")
        if time.monotonic() > deadline:
            raise BadInput(
                f"{folder}: not all of {', '.join(names)} are connected in time; their "
                "logs are in that folder"
            )
        time.sleep(0.1)


def _accepts(port: int) -> bool:
    """Return whether a process listens at the port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _port(server: Path) -> int:
    """Return the port that is open to other machines."""
    return int((server / "port").read_text())


def _inner(server: Path) -> int:
    """Return SuperLink's own port on this machine, or 0 before it has one."""
    with contextlib.suppress(FileNotFoundError):
        return int((server / "superlink.port").read_text())
    return 0


def main() -> int:
    """Run a command for separate machines. FOLDER is a server's or a silo's own."""
    parser = argparse.ArgumentParser(
        prog="python -P -m silodp.wire.flower.site", description=main.__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in {
        "provision": "make a server's folder, and a folder for each silo named",
        "server": "the server: Flower's SuperLink, the front door and the hub",
        "register": "admit a silo's node",
        "key": "make a silo's folder",
        "silo": "the silo's courier",
    }.items():
        commands.add_parser(name, help=purpose).add_argument("folder", type=Path)
    commands.choices["provision"].add_argument(
        "silos", nargs="*", help="none if silos make their own"
    )
    commands.choices["provision"].add_argument(
        "--host", default="localhost", help="the server's name or address"
    )
    commands.choices["provision"].add_argument(
        "--port", type=int, default=0, help="a free one if not given"
    )
    commands.choices["server"].add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 for nodes on other machines"
    )
    commands.choices["server"].add_argument(
        "--hub", type=Path, required=True, help="the socket at which the algorithm asks"
    )
    commands.choices["register"].add_argument(
        "silos", nargs="+", type=lambda pair: pair.split("=", 1), help="NAME=node.pub"
    )
    commands.choices["silo"].add_argument(
        "--superlink", required=True, help="HOST:PORT of the server"
    )
    commands.choices["silo"].add_argument(
        "--proxy", help="HOST:PORT of an HTTP proxy, through which the server is called"
    )
    commands.choices["silo"].add_argument(
        "--gate", type=Path, required=True, help="the gate's socket"
    )
    given = vars(parser.parse_args())
    given["folder"] = given["folder"].absolute()
    if given["command"] == "register":
        given["silos"] = {name: Path(public_key) for name, public_key in given["silos"]}
        # What starts the server does not wait until SuperLink listens.
        deadline = time.monotonic() + PATIENCE
        while not _accepts(_inner(given["folder"])) and time.monotonic() < deadline:
            time.sleep(0.1)
    try:
        if given["command"] in ("server", "register", "silo"):
            check("flwr")
        with safe_children():
            return globals()[given.pop("command")](**given) or 0
    except BadInput as wrong:
        print(visible(wrong), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
