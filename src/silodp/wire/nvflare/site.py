"""Sets up, starts and stops NVIDIA FLARE for silodp: certificates and kits, the settings that close
the engine's holes, and processes.

On one machine: `provision`, `start`, `restart_job`, `stop`. On separate machines each operator runs
`python -P -m silodp.wire.nvflare.site` with the kit of that machine. docs/deploy.md has the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.core.text import visible
from silodp.host.atomic import write
from silodp.host.python_path import child_environment, safe_children
from silodp.wire.many import LARGEST
from silodp.wire.nvflare.kits import PROJECT, REMOVED, SERVER, START, issue, start_script
from silodp.wire.site import Processes, attended, connected, free_port, warn
from silodp.wire.tunnel import tunnel
from silodp.wire.versions import check

LOST = 20
"""Seconds without a sign of life after which the server no longer lists a client."""
MESSAGE = LARGEST + 2**20
"""Most bytes of one message of the engine: the longest frame, and its envelope."""
SILENCE = 60
"""Seconds for which the server waits for the rest of a message."""
CREDENTIALS = ("rootCA.pem", "client.crt", "client.key")
MEMORY = {"MALLOC_ARENA_MAX": "2"}
"""With few arenas, threads share the memory that other threads have released. Otherwise each of the
engine's many threads would keep the memory of a frame.
"""


# --- kits ----------------------------------------------------------------------------------------


def provision(
    folder: Path, silos: Sequence[str], *, host: str = "localhost", port: int | None = None
) -> None:
    """Make a kit with certificates for the server, each silo and an administrator, in folder/kits.
    The server's kit is ready to run.

    folder/authority has the key of the certificate authority. Anyone with this key can add a silo.
    Without `port` a free one is used.
    """
    issue(folder, silos, host=host, port=port or free_port())
    if host == "localhost":
        bind = "127.0.0.1"
    else:
        bind = "0.0.0.0"
    settle_server(folder / "kits" / SERVER, folder / "hub.sock", bind=bind)


def settle_silo(kit: Path, gate: Path, via: Callable[[str], str] = lambda target: target) -> None:
    """Write the silo's kit again, and keep only its certificates and the server's address.

    A kit comes from the server's operator, whom the silo does not trust. Scripts, code in
    local/custom, extra configuration files and components in the kit would all run. So only the
    parts stay that are needed to find the server and to be recognised there.

    `via` returns the address that the engine calls instead of the server's. The kit also keeps the
    server's own address. Raise BadInput if the folder is not a client's kit.
    """
    start = kit / "startup"
    local = kit / "local"
    try:
        given = json.loads((start / "fed_client.json").read_text())
        target = given["servers"][0]["service"]["target"]
        identity = given["servers"][0]["identity"]
        name = given["client"]["fqsn"]
        scheme = given["servers"][0]["service"]["scheme"]
        target = given.get("silodp_server", target)
        credentials = {file: (start / file).read_bytes() for file in CREDENTIALS}
    except (OSError, ValueError, LookupError, TypeError):
        raise BadInput(
            f"{kit}: must be a client's startup kit of NVFlare, with "
            "startup/fed_client.json and certificates"
        ) from None
    if not all(isinstance(word, str) for word in (target, identity, name, scheme)):
        raise BadInput(
            f"{start / 'fed_client.json'}: target, scheme, identity and fqsn must be words"
        )
    for entry in kit.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    for place in (kit, start, local):
        place.mkdir(mode=0o700, exist_ok=True)
        place.chmod(0o700)
    for file, content in credentials.items():
        write(start / file, content)
    server = {
        "name": PROJECT,
        "service": {"target": via(target), "scheme": scheme},
        "identity": identity,
    }
    client = dict(zip(("ssl_root_cert", "ssl_cert", "ssl_private_key"), CREDENTIALS, strict=True))
    client |= {"fqsn": name, "is_leaf": True, "connection_security": "mtls"}
    settled = {
        "format_version": 2,
        "require_signed_jobs": True,
        "servers": [server],
        "client": client,
        "silodp_server": target,
    }
    _write(start / "fed_client.json", settled)
    courier = {
        "id": "silodp_courier",
        "path": "silodp.wire.nvflare.app.Courier",
        "args": {"socket": str(gate)},
    }
    resources = {
        "format_version": 2,
        # The courier makes the engine deaf to all commands of the server. What follows would hold
        # without it too. No class but the courier may be named by a job; NVFlare's own list has
        # some that read and write files.
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [courier["path"]],
        # Logs have exception texts. Unless forbidden the engine uploads error_log.txt (and
        # site_log_streamer, left out, a job's log).
        "allow_log_streaming": False,
        "client": {"retry_timeout": 30},
        # No launcher and no resource manager: a job could not even be started.
        "components": [courier],
    }
    _write(local / "resources.json", resources)
    _write(local / "authorization.json", _nobody())
    # Clients must not connect to each other.
    communication = {"allow_adhoc_conns": False, "streaming_max_blob_size": MESSAGE}
    _write(local / "comm_config.json", communication)
    _write(local / "log_config.json", _log())
    write(start / START, start_script(name))


def settle_server(kit: Path, hub: Path, *, bind: str = "0.0.0.0") -> None:
    """Write the settings of the server's kit: it opens the hub at `hub` for the algorithm's
    process, runs no jobs, and takes no log of a silo.

    Raise BadInput if the folder is not a server's kit.
    """
    start = kit / "startup"
    local = kit / "local"
    try:
        given = json.loads((start / "fed_server.json").read_text())
        port = given["servers"][0]["admin_port"]
    except (OSError, ValueError, LookupError, TypeError):
        raise BadInput(
            f"{kit}: must be a server's startup kit of NVFlare, with startup/fed_server.json"
        ) from None
    given["servers"][0]["service"]["target"] = f"{bind}:{port}"
    _write(start / "fed_server.json", given)
    store = {"path": "nvflare.app_common.storages.filesystem_storage.FilesystemStorage"}
    snapshots = {
        "path": store["path"],
        "args": {"root_dir": str(kit / "snapshots"), "uri_root": "/"},
    }
    jobs = {"uri_root": str(kit / "jobs"), "job_store_id": "job_store"}
    persistor = "nvflare.app_common.state_persistors.storage_state_persistor.StorageStatePersistor"
    resources = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [],
        "servers": [
            {
                "admin_storage": "transfer",
                "max_num_clients": 1000,
                "heart_beat_timeout": LOST,
                "admin_timeout": 5.0,
            }
        ],
        "snapshot_persistor": {"path": persistor, "args": {"uri_root": "/", "storage": snapshots}},
        "components": [
            {
                "id": "silodp_hub",
                "path": "silodp.wire.nvflare.app.ServerHub",
                "args": {"path": str(hub), "removed": str(kit / REMOVED)},
            },
            # The engine does not start without the following. There is no launcher and no
            # log_receiver.
            {
                "id": "job_scheduler",
                "path": "nvflare.app_common.job_schedulers.job_scheduler.DefaultJobScheduler",
                "args": {},
            },
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": jobs,
            },
            {"id": "job_store", **store},
        ],
    }
    _write(local / "resources.json", resources)
    _write(
        local / "comm_config.json",
        {"streaming_max_blob_size": MESSAGE, "streaming_read_timeout": SILENCE},
    )
    _write(local / "log_config.json", _log())
    write(start / START, start_script(SERVER))


def command(kit: Path) -> list[str]:
    """Return the command that runs the engine of a settled kit in the foreground."""
    return ["bash", str(kit.resolve() / "startup" / START), "--once"]


def environment(kit: Path) -> dict[str, str]:
    """Return the environment for `command`.

    NVFlare's script runs the first `python3` of PATH, and puts PYTHONPATH behind a folder of its
    own. An empty PYTHONPATH would mean the current folder there. So this PYTHONPATH names the
    folder of this package.
    """
    path = [str(Path(sys.executable).parent), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    inherited = child_environment()
    if "PYTHONPATH" in inherited:
        packages = [inherited["PYTHONPATH"]]
    else:
        packages = []
    packages.append(str(Path(__file__).resolve().parents[3]))
    return inherited | {
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(packages),
        "SILODP_SITE": str(kit),
    }


def _nobody() -> dict:
    """Return rights at a silo: none for every role. They include byoc (code in a job) and
    shell_commands (ls, cat, grep as the courier's user).
    """
    rights = (
        "submit_job",
        "clone_job",
        "manage_job",
        "download_job",
        "view",
        "operate",
        "shell_commands",
        "byoc",
    )
    none = dict.fromkeys((*rights, "server-predeployed-flwr"), "none")
    return {
        "format_version": "1.0",
        "permissions": dict.fromkeys(("project_admin", "org_admin", "lead", "member"), none),
    }


def _log() -> dict:
    """Return the settings of the engine's log."""
    line = {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}
    file = {
        "class": "logging.handlers.RotatingFileHandler",
        "formatter": "line",
        "filename": "log.txt",
        "maxBytes": 2**24,
        "backupCount": 3,
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"file": file},
        # At INFO the client's engine would write down each reply of the server, however long.
        "loggers": {"root": {"level": "WARNING", "handlers": ["file"]}},
    }


def _write(path: Path, content: dict) -> None:
    """Write a table as JSON."""
    write(path, json.dumps(content, indent=2) + "\n")


# --- processes -----------------------------------------------------------------------------------


def start(folder: Path, sockets: Mapping[str, Path], *, patience: float = 600.0) -> dict[str, int]:
    """Set up the kits, and start server and clients in the background. Return the pid of each
    process by name when all silos answer.
    """
    for name, gate in sockets.items():
        settle_silo(folder / "kits" / name, gate)
    return _bring_up(folder, [SERVER, *sockets], patience)


def restart_job(folder: Path, *, patience: float = 600.0) -> dict[str, int]:
    """Start every process of `start` again that no longer runs. Return the pid of each process by
    name when all silos answer.

    There is no job that could be lost. Clients reconnect to a server that is back, and the hub
    opens at the same path.
    """
    return _bring_up(folder, list(Processes(folder).started()), patience)


def stop(folder: Path) -> None:
    """End every process that `start` started."""
    processes = Processes(folder)
    processes.end(processes.started(), grace=2.0)
    processes.forget()


def explain(kit: Path) -> str:
    """Return one sentence: whether the server admits this silo's kit, and if not, why. NVFlare's
    own logs do not have the reason.
    """
    startup = kit / "startup"
    settings = json.loads((startup / "fed_client.json").read_text())
    host, _, port = settings["servers"][0]["service"]["target"].rpartition(":")
    try:
        trust = ssl.create_default_context(cafile=startup / "rootCA.pem")
        # The engine compares the name in the certificate with the kit's, not with the host's.
        trust.check_hostname = False
        if (startup / "client.crt").exists():
            trust.load_cert_chain(startup / "client.crt", startup / "client.key")
        with (
            socket.create_connection((host, int(port)), timeout=60.0) as line,
            trust.wrap_socket(line) as secured,
        ):
            secured.settimeout(5.0)
            # With TLS 1.3 the server refuses only after the handshake.
            with contextlib.suppress(TimeoutError):
                secured.recv(1)
    except ssl.SSLError as refused:
        for word, sentence in _REFUSALS.items():
            if word in str(refused).lower().replace("_", " "):
                return f"refused: {sentence}."
        return f"refused: {refused.reason}."
    except OSError:
        return f"unreachable: nothing listens at {host}:{port}, or it hung up."
    return "accepted: the server takes this kit's certificate."


_REFUSALS = {
    "alert certificate required": "the client showed no certificate",
    "alert certificate expired": "the client's certificate has expired",
    "alert unknown ca": "the client's certificate is not from the authority that the server trusts (wrong CA)",  # noqa: E501
    "alert decrypt error": "the client's certificate is not from the authority that the server trusts (wrong CA)",  # noqa: E501
    "certificate has expired": "the server's certificate has expired",
    "certificate verify failed": "the server's certificate is not from the authority that this kit trusts (wrong CA)",  # noqa: E501
    "key values mismatch": "the client's key does not belong to its certificate",
}


def _bring_up(folder: Path, names: Iterable[str], patience: float) -> dict[str, int]:
    """Start each of these processes that does not run, and wait until all silos are connected.
    Return the pids by name.

    Raise BadInput if a process ends at once, or if the silos are not connected in time.
    """
    processes = Processes(folder)
    started = set[str]()
    deadline = time.monotonic() + patience
    while True:
        # Each process is started once. The test is repeated, because a killed process needs a
        # moment to end.
        for name in set(names) - started:
            if not processes.runs(name):
                kit = folder / "kits" / name
                processes.start(name, command(kit), environment(kit), within=kit)
                started.add(name)
        silos = set(processes.started()) - {SERVER}
        online = connected(folder)
        if online is not None and silos <= set(online):
            return processes.pids()
        if dead := [name for name in sorted(started) if not processes.runs(name)]:
            raise BadInput(f"{dead[0]} ended at once: see {folder / f'{dead[0]}.log'}")
        if time.monotonic() > deadline:
            if online is None:
                reason = "the server does not run"
            else:
                missing = sorted(silos - set(online))
                explained = [f"{name}: {explain(folder / 'kits' / name)}" for name in missing]
                reason = "; ".join(explained)
            raise BadInput(f"{folder}: not up in {patience:g} s; {reason}; the logs are there")
        time.sleep(0.1)


# --- separate machines ---------------------------------------------------------------------------


def _run(kit: Path, *, attend: bool) -> int:
    """Run the engine of a set-up kit, and return its exit code.

    Normally this process becomes the engine. With `attend` it stays as the engine's parent, because
    it has the tunnel.
    """
    check("nvflare")
    warn(kit)
    words = command(kit)
    if attend:
        return attended(words, environment(kit))
    os.chdir(kit)
    os.execvpe(words[0], words, environment(kit))


def main() -> int:
    """Run a command for separate machines. KIT is the folder that the operator was given."""
    parser = argparse.ArgumentParser(
        prog="python -P -m silodp.wire.nvflare.site", description=main.__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, argument, purpose in (
        ("provision", "folder", "make certificates and a kit for the server and each silo"),
        ("server", "kit", "set up the server's kit and run it"),
        ("silo", "kit", "set up a silo's kit for its gate's socket and run it"),
        ("explain", "kit", "show whether the server admits a silo's kit, and if not why"),
    ):
        commands.add_parser(name, help=purpose).add_argument(
            argument, type=lambda text: Path(text).resolve()
        )
    commands.choices["provision"].add_argument("silos", nargs="+", help="the silos' names")
    commands.choices["provision"].add_argument("--host", required=True, help="the server's name")
    commands.choices["provision"].add_argument("--port", type=int, required=True)
    commands.choices["server"].add_argument(
        "--hub",
        type=lambda text: Path(text).resolve(),
        required=True,
        help="where the algorithm asks",
    )
    commands.choices["silo"].add_argument(
        "--gate", type=lambda text: Path(text).resolve(), required=True, help="the gate's socket"
    )
    commands.choices["silo"].add_argument(
        "--proxy", help="HOST:PORT of an HTTP proxy, through which the server is called"
    )
    given = parser.parse_args()
    try:
        match given.command:
            case "provision":
                with safe_children():
                    provision(given.folder, given.silos, host=given.host, port=given.port)
            case "explain":
                print(visible(explain(given.kit)))
            case "server":
                settle_server(given.kit, given.hub)
                _run(given.kit, attend=False)
            case "silo":
                if given.proxy:
                    settle_silo(given.kit, given.gate, partial(tunnel, proxy=given.proxy))
                else:
                    settle_silo(given.kit, given.gate)
                return _run(given.kit, attend=bool(given.proxy))
    except BadInput as wrong:
        print(visible(wrong), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with safe_children():
        sys.exit(main())
