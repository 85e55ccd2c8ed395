"""What a hostile server finds at a silo of a real NVFlare federation: no job of its runs there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from nvflare_federation import PATIENCE, until

from silodp.wire.nvflare import kits, site

pytestmark = pytest.mark.xdist_group("nvflare")  # one federation for all

RESOURCES = "passthrough_resource"
RUNS_JOBS = {
    "resource_manager": f"resource_managers.{RESOURCES}_manager.PassthroughResourceManager",
    "resource_consumer": f"resource_consumers.{RESOURCES}_consumer.PassthroughResourceConsumer",
    "process_launcher": "job_launcher.client_process_launcher.ClientProcessJobLauncher",
}
"""The components by which a site of NVFlare runs jobs. A settled kit has none of them."""


def nvflare_job(folder, *words):
    """Return the data that the engine's own command prints for the federation's administrator."""
    program = Path(sys.executable).with_name("nvflare")
    command = [program, "--format", "json", "--connect-timeout", "60", "job", *words]
    command += ["--startup-kit", folder / "kits" / kits.ADMIN / "startup"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    return json.loads(done.stdout.splitlines()[-1])["data"]


def hostile_job(folder, silo, mark):
    """Write a job whose code leaves a mark wherever it is imported."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    (folder / "app" / "custom").mkdir()
    (folder / "app" / "custom" / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    executor = {"tasks": ["x"], "executor": {"path": "mine.Mine", "args": {}}}
    workflow = {"id": "w", "path": "mine.Mine", "args": {}}
    at_silo = {"format_version": 2, "executors": [executor], "components": []}
    at_server = {"format_version": 2, "workflows": [workflow], "components": []}
    (config / "config_fed_client.json").write_text(json.dumps(at_silo))
    (config / "config_fed_server.json").write_text(json.dumps(at_server))
    meta = {"name": "job", "resource_spec": {}, "min_clients": 1, "mandatory_clients": [silo]}
    meta["deploy_map"] = {"app": ["server", silo]}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def refusal(folder, job, word):
    """Wait until the server's record of the job has `word`, and return the record as text."""
    identity = nvflare_job(folder, "submit", "-j", job)["job_id"]
    found = []

    def recorded():
        found.append(json.dumps(nvflare_job(folder, "meta", identity)))
        return word in found[-1]

    until(recorded)
    nvflare_job(folder, "abort", identity, "--force")
    return found[-1]


def test_a_settled_silo_has_no_part_of_the_engine_that_could_run_a_job(folder, tmp_path):
    mark = tmp_path / "ran"
    said = refusal(folder, hostile_job(tmp_path / "job", "a", mark), 'schedule_history": ["')
    assert "a: exception_occurred" in said
    assert "resource_manager" in said
    assert not mark.exists()
    kept = {entry.name for entry in (folder / "kits" / "a").iterdir() if entry.is_dir()}
    assert kept == {"startup", "local", "transfer"}, "nothing of the job arrived"


def test_code_in_a_job_is_refused_by_the_silos_own_rights_though_it_could_run_jobs(
    folder, tmp_path, gates, hub
):
    """The silo has every part that runs jobs, and lets everybody submit one. A settled kit gives
    none of this; what is left of it is that nobody may bring code (BYOC).
    """
    kit, mark = folder / "kits" / "d", tmp_path / "ran"
    site.settle_silo(kit, gates["a"])
    resources = kit / "local" / "resources.json"
    settings = json.loads(resources.read_text()) | {"class_list_enforcement_mode": "off"}
    settings["components"] += [
        {"id": name, "path": f"nvflare.app_common.{path}", "args": {}}
        for name, path in RUNS_JOBS.items()
    ]
    resources.write_text(json.dumps(settings))
    rights = kit / "local" / "authorization.json"
    given = json.loads(rights.read_text())
    for role in given["permissions"].values():
        role["submit_job"] = "any"
        assert role["byoc"] == "none"
    rights.write_text(json.dumps(given))
    client = subprocess.Popen(
        site.command(kit),
        env=site.environment(kit),
        cwd=kit,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: "d" in hub.names() or client.poll() is not None)
        said = refusal(folder, hostile_job(tmp_path / "job", "d", mark), "job_deploy_detail")
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait()
    assert "BYOC not permitted" in said
    assert not mark.exists()
    until(lambda: "d" not in hub.names())
