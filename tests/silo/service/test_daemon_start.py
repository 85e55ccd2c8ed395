"""What a gate daemon does not start with, and what `silodp silo init` writes for it."""

import hashlib
import re
import socket
import stat
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from gate_process import edited, made, write_data

from own_code import PROX
from silodp.core.errors import BadInput
from silodp.host.portable import running, sole
from silodp.silo.service import daemon
from silodp.silo.service.daemon import approved_problem
from silodp.silo.service.policy import DaemonSettings, Policy, Shuffling
from silodp.silo.service.provision import COMMENTS, Silo

# --- what a daemon does not start with -----------------------------------------------------------


def started(policy: str) -> str:
    """What keeps the daemon from starting; it would otherwise stop at once."""
    stop, tell = socket.socketpair()
    with stop, tell:
        tell.sendall(b"!")
        try:
            daemon.serve(policy, stop, lambda *_: None)
        except BadInput as error:
            return str(error)
    return "started"


@pytest.fixture
def idle(tmp_path, monkeypatch) -> Silo:
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    return made(tmp_path)


def test_a_second_daemon_other_models_other_modes_and_no_asker_are_refused(idle, tmp_path):
    folder = Path(idle.policy).parent
    assert started(idle.policy) == "started"
    with sole(str(folder / "ledger.db")):
        (tmp_path / "link").symlink_to(folder / "ledger.db")
        assert running(str(tmp_path / "link"))
        assert "another daemon" in started(edited(idle, ledger=f'"{tmp_path}/link"'))
    assert "by its definition" in started(edited(idle, model='"mlp:5"'))
    assert "by its definition" in started(edited(idle, prox='"l1:0.1"'))
    assert "by its definition" in started(edited(idle, definition=f'"{"0" * 64}"'))
    assert "askers" in started(edited(idle, askers="[]"))
    assert "budget" in started(edited(idle, epsilon="30.0"))
    for mode in ("0666", "0777", "660", "0060", "rw"):
        assert "socket_mode" in started(edited(idle, socket_mode=f'"{mode}"')), mode
    for name in ("silo.key", "ledger.db", "../clinic.csv"):
        for mode in (0o604, 0o640, 0o660):
            (folder / name).chmod(mode)
            assert f"has mode {mode:04o}" in started(idle.policy), name
        (folder / name).chmod(0o600)
    path = edited(idle)
    Path(path).chmod(0o622)
    assert "could write it" in started(path)
    assert "couriers" in started(edited(idle, couriers='["nobody-of-that-name"]'))
    assert "socket_group" in started(edited(idle, socket_group='"nobody-of-that-name"'))
    (folder / "gate.sock").write_text("not a socket")
    assert "is not a socket" in started(idle.policy)
    (folder / "gate.sock").unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "gate.sock"))
        other.listen()
        assert "another process listens" in started(idle.policy)
    assert started(idle.policy) == "started", "what nobody listens at is stale"
    (folder / "ledger.db").unlink()
    assert "there is no ledger" in started(idle.policy)
    assert not (folder / "ledger.db").exists()


def test_a_model_in_a_file_is_approved_by_the_bytes_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    model = tmp_path / "net.py"
    model.write_text(NET)
    model.chmod(0o600)
    silo = made(tmp_path, model=f"{model}:build")
    assert (
        DaemonSettings.load(silo.policy).model_sha256
        == hashlib.sha256(model.read_bytes()).hexdigest()
    )
    assert started(silo.policy) == "started"
    model.write_text(
        NET.replace("self.a(x)", "self.a(x) * 2")
    )  # the same definition, another function
    assert "approves a model file" in started(silo.policy)
    sha = hashlib.sha256(model.read_bytes()).hexdigest()
    assert started(edited(silo, model_sha256=f'"{sha}"')) == "started"
    model.chmod(0o602)
    assert "could write it" in started(edited(silo, model_sha256=f'"{sha}"'))


def test_a_loss_and_a_prox_in_files_are_approved_by_the_bytes_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    words = {"loss": (OWN_LOSS, "own"), "prox": (PROX, "Own:0.1")}
    files = {what: tmp_path / f"{what}.py" for what in words}
    for what, file in files.items():
        file.write_text(words[what][0])
        file.chmod(0o600)
    silo = made(tmp_path, **{what: f"{file}:{words[what][1]}" for what, file in files.items()})
    place = DaemonSettings.load(silo.policy)
    assert place.loss_sha256 == hashlib.sha256(OWN_LOSS.encode()).hexdigest()
    assert place.prox_sha256 == hashlib.sha256(PROX.encode()).hexdigest()
    definition = approved_problem(place, 3, None).definition()
    assert place.loss_sha256 in definition
    assert place.prox_sha256 in definition
    assert started(silo.policy) == "started"
    for what, file in files.items():
        ran = tmp_path / f"{what} ran"
        file.write_text(f"open({str(ran)!r}, 'w').close()\n{words[what][0]}")
        assert f"approves a {what} file" in started(silo.policy)
        assert not ran.exists(), "what was not approved is not run"
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        other = edited(silo, **{f"{what}_sha256": f'"{sha}"'})
        assert "definition" in started(other), "and what is approved is another problem"
        file.write_text(words[what][0])
    sub_module = f'"part:0:3:{files["prox"]}:Own:0.1"'
    assert "cannot be read" in started(edited(silo, prox=sub_module)), (
        "a file is named by its path alone"
    )
    assert "the prox is 'own.py'" in started(edited(silo, prox='"own.py"')), (
        "a file without a name names nothing"
    )


def test_a_file_that_two_words_name_is_read_once_so_that_both_hashes_are_of_what_runs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    file, other = tmp_path / "own.py", OWN_LOSS + PROX + "# another\n"
    file.write_text(OWN_LOSS + PROX)
    file.chmod(0o600)
    silo = made(tmp_path, loss=f"{file}:own", prox=f"{file}:Own:0.1")
    sha = hashlib.sha256(other.encode()).hexdigest()
    place = DaemonSettings.load(edited(silo, prox_sha256=f'"{sha}"'))
    read = daemon._bytes

    def changing(path: str) -> bytes:
        found = read(path)
        file.write_text(other)  # after it was read
        return found

    monkeypatch.setattr(daemon, "_bytes", changing)
    with pytest.raises(BadInput, match="approves a prox file"):
        approved_problem(place, 3, None)


def test_a_gate_loads_no_file_that_its_policy_does_not_name(idle, tmp_path):
    (tmp_path / "own.py").write_text(OWN_LOSS)
    with pytest.raises(BadInput, match="approves no file"):
        daemon._approved(DaemonSettings.load(idle.policy))(f"{tmp_path}/own.py:own")


OWN_LOSS = "def own(output, target):\n    return (output[..., 0] - target).abs()\n"

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.a = nn.Linear(features, outputs)

    def forward(self, x):
        return self.a(x)


def build(features, outputs):
    return Net(features, outputs)
"""


def test_init_writes_a_policy_with_a_comment_for_every_field_and_writes_over_nothing(
    tmp_path, silodp
):
    data = write_data(tmp_path / "clinic.csv")
    data.chmod(0o644)
    words = (
        "init",
        tmp_path / "a",
        "--data",
        data,
        "--label",
        "outcome",
        "--model",
        "mlp:4",
        "--epsilon",
        3,
    )
    code, out, err = silodp(*words)
    assert (code, err) == (0, "")
    for sentence in (
        "60 records, 3 features",
        "only 60 records",
        "differ in scale",
        "mode 0644",
        "public key to askers",
    ):
        assert sentence in out
    assert "98765" not in out
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {path.name for path in before} == {
        "policy.toml",
        "silo.key",
        "silo.json",
        "ledger.db",
        "ledger.db.anchor",
    }
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in before)
    text = (tmp_path / "a/policy.toml").read_text()
    for kind, table in zip((Policy, DaemonSettings), text.split("[daemon]"), strict=True):
        assert sorted(re.findall(r"(?m)^# .+\n(\w+) = ", table)) == sorted(
            field.name for field in fields(kind)
        )
    assert {
        field.name for kind in (Policy, DaemonSettings, Shuffling) for field in fields(kind)
    } == set(COMMENTS)
    assert DaemonSettings.load(tmp_path / "a/policy.toml").data == str(data)
    code, _, err = silodp(*words)
    assert (code, "does not overwrite files" in err) == (2, True)
    code, _, err = silodp(*(tmp_path / "b" if word == tmp_path / "a" else word for word in words))
    assert (code, "in common with the one whose ledger is" in err) == (2, True)
    assert not list((tmp_path / "b").iterdir())
    assert before == {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}


@pytest.mark.parametrize("name", [field.name for field in fields(DaemonSettings)])
def test_a_missing_misspelt_or_mistyped_setting_is_named(tmp_path, name):
    text = "\n".join(["[daemon]", *(f"{key} = {value}" for key, value in SETTINGS.items())]) + "\n"
    path = tmp_path / "policy.toml"
    path.write_text(text)
    assert DaemonSettings.load(path).ledger == str(tmp_path / "ledger.db")
    newer = (
        "schema",
        "held_out",
        "loss",
        "loss_sha256",
        "prox_sha256",
        "feature_map",
        "feature_map_sha256",
    )  # older policies have none
    absent = () if name in newer else ("",)
    for new in (
        *absent,
        f"{name}s = 1\n",
        f"{name} = {{}}\n",
        f"{name} = true\n",
        f"{name} = -1\n",
        f"{name} = [1]\n",
    ):
        path.write_text(re.sub(rf"(?m)^{name} = .*\n", new, text))
        with pytest.raises(BadInput, match=name):
            DaemonSettings.load(path)
    path.write_text("")
    with pytest.raises(BadInput, match="no table"):
        DaemonSettings.load(path)


SETTINGS = {name: '"x"' for name in ("data", "label", "model", "prox", "key", "log", "socket")}
SETTINGS |= {
    "classes": "[]",
    "couriers": "[]",
    **dict.fromkeys(
        ("model_sha256", "prox_sha256", "loss_sha256", "feature_map_sha256", "loss", "feature_map"),
        '""',
    ),
    "schema": '""',
    "held_out": "0.0",
    "socket_group": '""',
    "socket_mode": '"0600"',
    "ledger": '"ledger.db"',
}
SETTINGS |= {"log_bytes": "5000", "connections": "4", "timeout": "2", "maximum_frame": "10000"}


# --- what it loads -------------------------------------------------------------------------------


def test_what_answers_loads_neither_what_reads_files_nor_what_only_some_policies_use():
    """A reviewer of an answer need not read them, and a gate without them does not load them."""
    show = "import sys, silodp.silo.service.daemon; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    loaded = {name for name in shown.stdout.split() if name.startswith("silodp")}
    data = ("reading", "files", "tables", "cells", "images", "persons", "faults")
    service = ("elsewhere", "masking", "approve")
    apart = {
        *(f"silodp.silo.data.{name}" for name in data),
        *(f"silodp.silo.service.{name}" for name in service),
        "silodp.core.features.feature_map",
        "silodp.core.problem.trial",
        "silodp.core.privacy.sampled",
        "silodp.core.protocol.offers",
        "silodp.host.extension",
        "silodp.host.shipped",
        "silodp.host.study",
        "silodp.silo.answer.products",
        "silodp.silo.ledger.delayed",
        "silodp.silo.service.pace",
    }
    assert not loaded & apart
    assert len(loaded) <= 92  # each statistic is a file of its own


def test_a_policy_with_the_tables_of_two_kinds_of_totals_is_refused():
    from silodp.silo.service.daemon import _trust

    shuffling: Any = object()
    masking: Any = object()
    with pytest.raises(BadInput, match=r"\[shuffle\] and \[masks\]"):
        _trust(shuffling, masking, shuffling, shuffling)
