"""The processes of a Flower federation: what the server's operator and a silo's operator start, and
all of it at once on one machine.

A server's folder has ca.pem, ca.key, server.pem, server.key, the secret that its job shows,
SuperLink's database, and the app; a silo's has ca.pem, node.key and its own secret. `python -P -m
silodp.wire.flower.site --help` has the commands for separate machines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.text import visible
from silodp.host.atomic import write
from silodp.host.python_path import child_environment, safe_children
from silodp.wire.flower.keys import certify, key
from silodp.wire.private import check
from silodp.wire.site import Processes, connected, die_with_parent, free_port, warn, watched
from silodp.wire.tunnel import tunnel

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""No telemetry, no question about updates, no packages installed because a server says so."""
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
"""Seconds in which a process that is told to end may take its leave."""


def explain(log: str) -> str:
    """Why the server, or the node, refused the other, in one sentence; empty if the log names no
    known reason.
    """
    return next((sentence for sign, sentence in SIGNS.items() if sign.lower() in log.lower()), "")


# --- keys and certificates -----------------------------------------------------------------------


def provision(
    folder: Path, silos: Sequence[str], *, host: str = "localhost", port: int = 0, days: int = 365
) -> None:
    """Makes a server's folder (`folder/server`) and one for each silo (`folder/silos/NAME`), with
    keys, for start() or for shipping.
    """
    if len(set(silos)) < len(silos) or not all(
        re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,30}", name) for name in silos
    ):
        raise BadInput(
            f"silos: {list(silos)!r} must be different names of small letters, digits, - "
            "and _, at most 31 long"
        )
    if {"superlink", "job"} & set(silos):
        raise BadInput(
            "silos: superlink and job are the names of the server's processes; choose another name"
        )
    server = folder / "server"
    server.mkdir(parents=True, mode=0o700)
    certify(server, host, days)
    write(server / "secret", secrets.token_bytes(32))
    write(server / "port", str(port or free_port()).encode())
    for name in silos:
        key(folder / "silos" / name)
        write(folder / "silos" / name / "ca.pem", (server / "ca.pem").read_bytes())


# --- the server's operator -----------------------------------------------------------------------


def superlink(folder: Path, host: str) -> None:
    """Flower's SuperLink with TLS, node authentication and a database, in this process; other
    machines reach its Fleet API alone.
    """
    from flwr.superlink.cli import flower_superlink

    from silodp.wire.flower.door import close_to_others, watch

    close_to_others()
    warn(folder)
    tls = [
        f"--ssl-certfile={folder / 'server.pem'}",
        f"--ssl-keyfile={folder / 'server.key'}",
        f"--ssl-ca-certfile={folder / 'ca.pem'}",
    ]
    closed = [
        "--enable-supernode-auth",
        "--isolation=process",
        f"--superexec-auth-secret-file={folder / 'secret'}",
    ]
    sys.argv = [
        "flower-superlink",
        f"--host={host}",
        f"--port={_port(folder)}",
        f"--database={folder / 'superlink.db'}",
        *tls,
        *closed,
    ]
    watch(host, _port(folder), folder / "ca.pem")
    flower_superlink()


def register(folder: Path, silos: Mapping[str, Path]) -> None:
    """Admits the nodes that hold the keys (silo -> its node.pub), each under its silo's name; a key
    that is admitted stays as it is.
    """
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.proto.control_pb2 import RegisterNodeRequest

    with _control(folder) as control:
        for name, public_key in silos.items():
            with contextlib.suppress(KeyIsRegistered):
                _ask(
                    control.RegisterNode,
                    RegisterNodeRequest(public_key=try_load_public_key(public_key), name=name),
                )


def job(folder: Path, hub: Path) -> None:
    """Starts a run, and is its ServerApp in this process: the hub at `hub` carries frames until
    SIGTERM.
    """
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    from silodp.wire.flower import app as flower

    os.environ["SILODP_HUB"] = str(hub)
    watched("server", folder)
    with _control(folder) as control:
        _ask(control.StartRun, StartRunRequest(fab=Fab(content=flower.bundle())))
    flower.job(
        f"127.0.0.1:{_port(folder)}",
        (folder / "ca.pem").read_bytes(),
        (folder / "secret").read_bytes(),
    )


def unregister(folder: Path, silos: Sequence[str]) -> None:
    """The nodes of these names are let in no more; the others notice nothing."""
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest

    with _control(folder) as control:
        there = {
            node.name: node.node_id
            for node in control.ListNodes(ListNodesRequest()).nodes_info
            if node.status != "unregistered"
        }
        if strange := sorted(set(silos) - set(there)):
            raise BadInput(
                f"SuperLink has no silo {strange[0]!r}; it has {', '.join(sorted(there)) or 'none'}"
            )
        for name in silos:
            _ask(control.UnregisterNode, UnregisterNodeRequest(node_id=there[name]))


class KeyIsRegistered(BadInput):
    """SuperLink has the key already."""


def _control(folder: Path):
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="silodp")
    return ControlHttpClient.from_server_address(
        f"127.0.0.1:{_port(folder)}", False, (folder / "ca.pem").read_bytes(), [version]
    )


def _ask(call: Callable, request: object) -> None:
    import httpx

    try:
        call(request)
    except httpx.HTTPStatusError as error:
        if "already in use" in error.response.text:
            raise KeyIsRegistered("the key is registered already") from None
        raise BadInput(f"SuperLink refuses: {error.response.text[:300]}") from None
    except httpx.HTTPError as error:
        raise BadInput(f"SuperLink cannot be reached: {explain(str(error)) or error}") from None


# --- a silo's operator ---------------------------------------------------------------------------


def silo(folder: Path, superlink: str, gate: Path, proxy: str | None = None) -> int:
    """A SuperNode and its worker, which carries frames to the gate's socket; until SIGTERM, or
    until the SuperNode ends.
    """
    from silodp.wire.flower import app as flower

    superlink = (
        tunnel(superlink, proxy) if proxy else superlink
    )  # whose certificate is for this machine's own address too

    os.environ["SILODP_GATE"] = str(gate)
    watched("courier", folder)
    log, port = folder / "node.log", free_port()
    _hang_up(folder, superlink, log)
    link = [
        f"--superlink={superlink}",
        f"--root-certificates={folder / 'ca.pem'}",
        f"--auth-supernode-private-key={folder / 'node.key'}",
    ]
    closed = [
        "--isolation=process",
        f"--superexec-auth-secret-file={folder / 'secret'}",
        "--host=127.0.0.1",
        f"--port={port}",
    ]
    command = [
        sys.executable,
        "-P",
        "-c",
        "from silodp.wire.flower.app import supernode; supernode()",
        *link,
        *closed,
    ]
    with log.open("w") as out:
        node = subprocess.Popen(
            command,
            env=child_environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    signal.signal(signal.SIGTERM, lambda *_: node.terminate())
    while node.poll() is None and not _accepts(port):
        time.sleep(0.1)
    flower.work(f"127.0.0.1:{port}", (folder / "secret").read_bytes(), lambda: node.poll() is None)
    if node.returncode and (reason := explain(log.read_text())):
        print(visible(reason), flush=True)
    return node.returncode and 1


def _hang_up(folder: Path, superlink: str, log: Path) -> None:
    """After a crash SuperLink takes the node to be connected for a minute, and would refuse it:
    tell it otherwise, with the node's key.
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    if not (found := re.search(r"SuperNode ID: (\d+)", log.read_text() if log.exists() else "")):
        return
    private: Any = load_ssh_private_key((folder / "node.key").read_bytes(), None)
    signed = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, private.public_key()),
    ]
    with (
        contextlib.suppress(Exception),
        FleetHttpClient.from_server_address(
            superlink, False, str(folder / "ca.pem"), signed
        ) as fleet,
    ):
        fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(found[1])))


# --- all of it on one machine --------------------------------------------------------------------


def start(folder: Path, sockets: Mapping[str, Path], *, patience: float = 600.0) -> dict[str, int]:
    """Starts SuperLink, a courier per silo and the job; name -> pid once the hub at folder/hub.sock
    knows all silos. Each is the leader of a process group, and writes to folder/NAME.log."""
    folder, deadline = folder.absolute(), time.monotonic() + patience
    if len(str(folder / "hub.sock")) > 107:
        raise BadInput(
            f"{folder}: the path is too long for a socket in it; at most 98 characters will do"
        )
    if missing := [name for name in sockets if not (folder / "silos" / name / "node.key").exists()]:
        raise BadInput(f"{folder}: silo {missing[0]} was not provisioned there")
    if find_spec("flwr") is None:
        raise BadInput("Flower is not installed; pip install 'silodp[flower]' installs it")
    server = folder / "server"
    restart_superlink(folder, patience=patience)
    register(server, {name: folder / "silos" / name / "node.pub" for name in sockets})
    for name, gate in sockets.items():
        start_silo(folder, name, gate)
    restart_job(folder, patience=patience)
    _await(
        lambda: set(sockets) <= set(connected(folder) or ()),
        folder,
        ["superlink", "job", *sockets],
        deadline,
    )
    return Processes(folder).pids()


def start_silo(folder: Path, name: str, gate: Path) -> int:
    """Starts one silo's courier, for the first time or after it was killed."""
    return _spawn(
        folder.absolute(),
        name,
        "silo",
        folder.absolute() / "silos" / name,
        f"--superlink=127.0.0.1:{_port(folder / 'server')}",
        f"--gate={Path(gate).absolute()}",
    )


def restart_superlink(folder: Path, *, patience: float = 600.0) -> int:
    """SuperLink with the database that it had; nodes come back by themselves, and the run is over:
    restart_job() makes another.
    """
    folder, deadline = folder.absolute(), time.monotonic() + patience
    Processes(folder).end(["superlink"], GRACE)
    pid = _spawn(folder, "superlink", "superlink", folder / "server")
    _await(lambda: _accepts(_port(folder / "server")), folder, ["superlink"], deadline)
    return pid


def restart_job(folder: Path, *, patience: float = 600.0) -> int:
    """A new run of the app, whether the old job still runs or was killed; its pid once the hub
    answers. Nodes stay connected.
    """
    folder, deadline = folder.absolute(), time.monotonic() + patience
    Processes(folder).end(["job"], GRACE)
    pid = _spawn(folder, "job", "job", folder / "server", f"--hub={folder / 'hub.sock'}")
    _await(lambda: connected(folder) is not None, folder, ["superlink", "job"], deadline)
    return pid


def stop(folder: Path) -> None:
    """Ends every process that start() began and that still runs: the job first, SuperLink last, so
    that nodes can take their leave.
    """
    processes = Processes(folder.absolute())
    couriers = [name for name in processes.started() if name not in ("job", "superlink")]
    for names in (["job"], couriers, ["superlink"]):
        processes.end(names, GRACE)
    processes.forget()


def _spawn(folder: Path, name: str, command: str, home: Path, *arguments: str) -> int:
    environment = (
        child_environment() | QUIET | {"FLWR_HOME": str(home / "home"), "OMP_NUM_THREADS": "1"}
    )
    words = [sys.executable, "-P", "-m", "silodp.wire.flower.site", command, str(home), *arguments]
    return Processes(folder).start(name, words, environment, within=home)


def _await(ready: Callable[[], bool], folder: Path, names: Sequence[str], deadline: float) -> None:
    processes = Processes(folder)
    while not ready():
        for name in names:
            if not processes.runs(name):
                log = (folder / f"{name}.log").read_text()
                raise BadInput(
                    f"{name} ended at once: {explain(log) or 'see ' + str(folder / f'{name}.log')}"
                )
        if time.monotonic() > deadline:
            raise BadInput(
                f"{folder}: not all of {', '.join(names)} are connected in time; their "
                "logs are in that folder"
            )
        time.sleep(0.1)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _port(server: Path) -> int:
    return int((server / "port").read_text())


def main() -> int:
    """The commands for separate machines; FOLDER is a server's or a silo's own."""
    parser = argparse.ArgumentParser(
        prog="python -P -m silodp.wire.flower.site", description=main.__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in {
        "provision": "make a server's folder, and a folder for each silo named",
        "superlink": "the server's Flower",
        "job": "the server's courier",
        "register": "admit a silo's node",
        "key": "make a silo's folder",
        "silo": "the silo's courier",
    }.items():
        commands.add_parser(name, help=does).add_argument("folder", type=Path)
    commands.choices["provision"].add_argument(
        "silos", nargs="*", help="none if silos make their own"
    )
    commands.choices["provision"].add_argument(
        "--host", default="localhost", help="the server's name or address"
    )
    commands.choices["provision"].add_argument(
        "--port", type=int, default=0, help="a free one if not given"
    )
    commands.choices["superlink"].add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 for nodes on other machines"
    )
    commands.choices["register"].add_argument(
        "silos", nargs="+", type=lambda pair: pair.split("=", 1), help="NAME=node.pub"
    )
    commands.choices["job"].add_argument(
        "--hub", type=Path, required=True, help="the socket at which the algorithm asks"
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
    os.environ.update(QUIET)
    if given["command"] in ("superlink", "job", "register", "silo"):
        try:
            check("flwr")
        except BadInput as wrong:
            print(visible(wrong), file=sys.stderr)
            return 2
    if given["command"] == "register":
        given["silos"] = {name: Path(public_key) for name, public_key in given["silos"]}
    if given["command"] in (
        "register",
        "job",
    ):  # what starts SuperLink does not wait until it listens
        deadline = time.monotonic() + PATIENCE
        while not _accepts(_port(given["folder"])) and time.monotonic() < deadline:
            time.sleep(0.1)
    try:
        return globals()[given.pop("command")](**given) or 0
    except BadInput as wrong:
        print(visible(wrong), file=sys.stderr)
        return 2


if __name__ == "__main__":
    with safe_children():
        sys.exit(main())
