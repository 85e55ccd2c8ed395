"""One NVFlare federation for all tests of it: a real server and three clients with mutual TLS on
loopback; the gates give a frame back reversed.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from silodp.wire.hub import Hub
from silodp.wire.site import group_runs


@pytest.fixture(scope="package")
def gates(tmp_path_factory):
    from nvflare_federation import GATE, SILOS

    place, started = tmp_path_factory.mktemp("gates"), {}
    for name in SILOS:
        started[name] = subprocess.Popen([sys.executable, "-c", GATE, str(place / name)])
    yield {name: place / name for name in SILOS}
    for gate in started.values():
        gate.kill()
        gate.wait()


@pytest.fixture(scope="package")
def folder(tmp_path_factory, gates):
    from nvflare_federation import MODIFIED

    from silodp.wire.nvflare import site

    folder = tmp_path_factory.mktemp("fed") / "f"
    site.provision(folder, [*gates, "d", *MODIFIED])
    resources = folder / "kits" / "server" / "local" / "resources.json"
    settings = json.loads(resources.read_text())
    spy = {
        "id": "modified",
        "path": "nvflare_federation.ModifiedServer",
        "args": {"path": str(folder / "modified.sock")},
    }
    settings["components"].append(spy)
    resources.write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:  # over before other tests of this worker run
        _find_modified_engine(patch)
        site.start(folder, gates)
    yield folder
    pids = [pid for pid, _ in json.loads((folder / "processes.json").read_text()).values()]
    site.stop(folder)
    assert not any(group_runs(pid) for pid in pids)
    assert not (folder / "hub.sock").exists()


@pytest.fixture
def modified_silo(request, folder, gates, hub):
    """One more silo, whose engine says what it is told. Each test has its own: what one has begun
    keeps it from being heard for a minute.
    """
    from nvflare_federation import SILOS, until

    from silodp.wire.nvflare import site

    kit = folder / "kits" / request.param
    site.settle_silo(kit, gates["a"])
    resources = kit / "local" / "resources.json"
    settings = json.loads(resources.read_text()) | {"class_list_enforcement_mode": "off"}
    settings["components"].append(
        {
            "id": "modified",
            "path": "nvflare_federation.ModifiedSilo",
            "args": {"path": str(kit / "x.sock")},
        }
    )
    resources.write_text(json.dumps(settings))
    client = subprocess.Popen(
        site.command(kit),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: (kit / "x.sock").exists() and request.param in hub.names())
        yield Hub(kit / "x.sock")
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait()
        (kit / "x.sock").unlink(missing_ok=True)
    until(lambda: hub.names() == SILOS)


@pytest.fixture
def hub(folder, monkeypatch):
    """The federation's hub. What a test of it starts again finds the modified engine, too."""
    _find_modified_engine(monkeypatch)
    return Hub(folder / "hub.sock")


def _find_modified_engine(patch):
    """Let processes that are started from now on import `nvflare_federation`."""
    entries = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, entries)))
