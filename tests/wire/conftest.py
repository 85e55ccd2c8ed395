"""One NVFlare federation for all tests of it: a real server and three clients with mutual TLS on
loopback; the gates give a frame back reversed.
"""

import json
import os
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
    from silodp.wire.nvflare import site

    folder = tmp_path_factory.mktemp("fed") / "f"
    site.provision(folder, [*gates, "d"])
    resources = folder / "kits" / "server" / "local" / "resources.json"
    settings = json.loads(resources.read_text())
    spy = {
        "id": "watcher",
        "path": "nvflare_federation.Watcher",
        "args": {"path": str(folder / "watcher.sock")},
    }
    settings["components"].append(spy)
    resources.write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        _find_modified_engine(patch)
        site.start(folder, gates)
    yield folder
    pids = [pid for pid, _ in json.loads((folder / "processes.json").read_text()).values()]
    site.stop(folder)
    assert not any(group_runs(pid) for pid in pids)
    assert not (folder / "hub.sock").exists()


@pytest.fixture
def hub(folder, monkeypatch):
    """The federation's hub. A server that a test of it starts again finds the modified engine."""
    _find_modified_engine(monkeypatch)
    return Hub(folder / "hub.sock")


def _find_modified_engine(patch):
    """Let processes that are started from now on import `nvflare_federation`."""
    entries = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, entries)))
