"""Who else could change what a daemon uses: every path of a gate and of a shuffler, with files of
real other users.
"""

import hashlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mixing import ROSTER, SERVER
from own_code import PROX
from silodp.core.errors import BadInput
from silodp.host.keys import public
from silodp.host.ownership import changeable, exposed, reachable
from silodp.shuffler import daemon as shuffler_daemon
from silodp.shuffler import provision as shuffler_commands
from silodp.silo.service import daemon
from silodp.silo.service.policy import DaemonSettings, Shuffling
from silodp.silo.service.provision import provision

EVE, GATE = 65533, 65534  # users that own nothing here
ASKER = public(SERVER)
needs_users = pytest.mark.skipif(os.getuid() != 0, reason="needs to make files of other users")
SCHEMA = """
[columns.a]
type = "number"
range = [0, 100]
[label]
column = "ill"
task = "binary"
classes = ["no", "yes"]
"""
NET = (
    "from torch import nn\n\ndef build(features, outputs):\n    return "
    "nn.Sequential(nn.Linear(features, outputs))\n"
)
LOSS = "def own(output, target):\n    return (output - target[..., None]).abs().sum(-1)\n"


def said(serve, path) -> str:
    """What a daemon says when it is to start, and is told to stop at once."""
    stop, tell = socket.socketpair()
    with stop, tell:
        tell.sendall(b"!")
        try:
            serve(path, stop, lambda *_: None)
        except BadInput as error:
            return str(error)
    return "started"


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(mode=0o700)
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@pytest.fixture
def tmp_path(passable):
    """Other users may pass through this folder, as through an operator's."""
    return passable


def gate_of(folder: Path) -> dict[str, Path]:
    """A silo with a shuffler whose every file has a folder of its own: where each is."""
    rows = "\n".join(f"{i % 97},{('no', 'yes')[i % 2]}" for i in range(60))
    data, schema, model, loss, prox, features = (
        put(folder / name, text)
        for name, text in (
            ("data/c.csv", f"a,ill\n{rows}\n"),
            ("schema/s.toml", SCHEMA),
            ("model/net.py", NET),
            ("loss/own.py", LOSS),
            ("prox/own.py", PROX),
            ("features/own.py", "def same(x):\n    return x\n"),
        )
    )
    (folder / "anchor").mkdir()
    silo = provision(
        folder / "policy",
        data=data,
        label="",
        name="clinic",
        epsilon=30.0,
        model=f"{model}:build",
        schema=schema,
        loss=f"{loss}:own",
        prox=f"{prox}:Own:0.1",
        askers=[ASKER],
        feature_map=f"{features}:same",
        shuffler=ASKER,
        members=6,
        anchor=folder / "anchor/anchor",
        registry=folder / "state/ledgers",
    )
    policy = Path(silo.policy)
    found = {
        "policy": policy,
        "data": data,
        "schema": schema,
        "model": model,
        "loss": loss,
        "prox": prox,
        "feature_map": features,
        "anchor": folder / "anchor/anchor",
    }
    found |= {"state": folder / "state/ledgers"}
    for name, file in (
        ("key", "silo.key"),
        ("log", "gate.log"),
        ("socket", "gate.sock"),
        ("pseudonym", "pseudonym.key"),
    ):
        found[name] = apart(folder, policy, name, file)
    shutil.move(
        policy.parent / "ledger.db", (folder / "ledger").mkdir() or folder / "ledger/ledger.db"
    )
    rewrite(policy, "ledger", folder / "ledger/ledger.db")
    return found | {"ledger": folder / "ledger/ledger.db"}


def apart(folder: Path, settings: Path, name: str, file: str) -> Path:
    (folder / name).mkdir(mode=0o700)
    if (settings.parent / file).exists():
        shutil.move(settings.parent / file, folder / name / file)
    rewrite(settings, name, folder / name / file)
    return folder / name / file


def rewrite(settings: Path, name: str, value: Path) -> None:
    text, times = re.subn(rf"(?m)^{name} = .*$", f'{name} = "{value}"', settings.read_text())
    assert times == 1
    settings.write_text(text)


def every_wrong(serve, settings: Path, found: dict[str, Path]) -> None:
    """Each file, its folder and the folder above, with another owner or another mode: each is
    refused and named.
    """
    assert said(serve, settings) == "started"
    for name, path in found.items():
        for victim in (path, path.parent):
            if (
                not victim.exists() or victim.is_socket()
            ):  # as the socket, which the daemon takes away
                continue
            mode = victim.stat().st_mode
            passed = (
                path.is_dir() and victim != path
            )  # a sticky folder on the way to a folder of ours will do
            for wrong in (0o777, 0o702) if passed else (0o777, 0o702, 0o1777):
                victim.chmod(wrong)
                sentence = said(serve, settings)
                assert str(victim) in sentence, (name, oct(wrong))
                assert "may write" in sentence or "could write it" in sentence
            victim.chmod(mode)
            for user, group in ((EVE, -1), (-1, EVE)):
                os.chown(victim, user, group)
                if user < 0:
                    victim.chmod(0o770)
                sentence = said(serve, settings)
                assert str(victim) in sentence, (name, user)
                assert ("belongs to user 65533" if user > 0 else "has mode 0770") in sentence
                os.chown(victim, 0, 0)
                victim.chmod(mode)
    assert said(serve, settings) == "started"


@needs_users
def test_a_gate_starts_only_if_nobody_else_could_change_any_of_its_files_or_their_folders(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    found = gate_of(tmp_path)
    paths = {
        field.name
        for kind in (DaemonSettings, Shuffling)
        for field in fields(kind)
        if field.type == "str"
    }
    no_paths = {
        "label",
        "model_sha256",
        "prox_sha256",
        "loss_sha256",
        "feature_map_sha256",
        "socket_mode",
        "socket_group",
        "shuffler",
    }
    assert paths - no_paths | {"policy", "anchor", "state"} == set(found), (
        "a new path is checked too"
    )
    every_wrong(daemon.serve, found["policy"], found)


@needs_users
def test_a_shuffler_starts_only_if_nobody_else_could_change_any_of_its_files_or_their_folders(
    tmp_path,
):
    shuffler_commands.provision(tmp_path / "settings", askers=[ASKER], members=ROSTER)
    settings = tmp_path / "settings/shuffler.toml"
    files = {
        "seal_key": "seal.key",
        "sign_key": "sign.key",
        "store": "rounds.db",
        "log": "shuffler.log",
        "socket": "shuffler.sock",
    }
    found = {name: apart(tmp_path, settings, name, file) for name, file in files.items()}
    every_wrong(shuffler_daemon.serve, settings, found | {"settings": settings})


@needs_users
def test_a_policy_that_another_user_swapped_is_not_believed_and_its_code_does_not_run(
    tmp_path, monkeypatch
):
    """The attack as it was found: a folder that all may write, policy.toml 0600 in it, and another
    user with a policy of his own.
    """
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    policy = gate_of(tmp_path)["policy"]
    policy.parent.chmod(0o777)
    text = re.sub(
        r"(?m)^model = .*$", f'model = "{policy.parent}/evil.py:build"', policy.read_text()
    )
    ran, evil = tmp_path / "ran", f"open({str(tmp_path / 'ran')!r}, 'w')\n{NET}"
    sha = hashlib.sha256(evil.encode()).hexdigest()
    text = re.sub(r"(?m)^model_sha256 = .*$", f'model_sha256 = "{sha}"', text)
    attack = f"""
import os
os.chdir({str(policy.parent)!r})
os.rename("policy.toml", "old")
open("evil.py", "w").write({evil!r})
open("policy.toml", "w").write({text!r})
os.chmod("policy.toml", 0o644)
"""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    subprocess.run(
        [python, "-I", "-c", attack], user=EVE, group=EVE, extra_groups=[], check=True, cwd="/"
    )
    done = subprocess.run(
        [sys.executable, "-m", "silodp.cli", "silo", "serve", str(policy)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{policy.parent} has mode 0777" in done.stderr
    assert not ran.exists()
    policy.parent.chmod(0o755)  # too late: the swapped file is another user's
    assert f"{policy} belongs to user {EVE}" in said(daemon.serve, policy)
    os.chown(policy, 0, 0)  # and so is the code that it names
    assert f"{policy.parent}/evil.py belongs to user {EVE}" in said(daemon.serve, policy)
    assert not ran.exists()


@needs_users
def test_a_gate_of_another_user_takes_its_own_files_and_roots_and_no_third_users(tmp_path):
    words = (
        "import os, sys; from silodp.host.ownership import changeable; os.setgroups([]); "
        "os.setgid(65534); os.setuid(65534); "
    )
    look = [sys.executable, "-c", f"{words}print(changeable(sys.argv[1]) or 'ours')"]

    def seen(path: Path) -> str:
        return subprocess.run(
            [*look, str(path)], capture_output=True, text=True, cwd="/", check=True
        ).stdout.strip()

    folder = tmp_path / "silo"
    folder.mkdir(0o700)
    (folder / "f").touch(0o600)
    os.chown(folder, GATE, GATE)
    assert seen(folder / "f") == "ours", "root's file"
    os.chown(folder / "f", GATE, GATE)
    assert seen(folder / "f") == "ours"
    os.chown(folder / "f", EVE, GATE)
    assert f"belongs to user {EVE}" in seen(folder / "f")
    os.chown(folder / "f", GATE, GATE)
    os.chown(folder, EVE, GATE)
    folder.chmod(0o755)
    assert f"{folder} belongs to user {EVE}" in seen(folder / "f")
    os.chown(folder, 0, GATE)
    folder.chmod(0o775)
    assert "has mode 0775" in seen(folder / "f"), "others have this group too"


# --- the way to a file ---------------------------------------------------------------------------


@pytest.fixture
def way(tmp_path) -> Path:
    (tmp_path / "good").mkdir(0o700)
    (tmp_path / "good/f").touch(0o600)
    (tmp_path / "open").mkdir()
    (tmp_path / "open/f").touch(0o600)
    (tmp_path / "open").chmod(0o777)
    return tmp_path


def test_every_step_of_every_link_is_looked_at(way, monkeypatch):
    assert changeable(way / "good/f") is None
    for name, target in {
        "into": way / "open/f",
        "relative": "../open/f",
        "folder": way / "open",
    }.items():
        (way / "good" / name).symlink_to(target)
        assert f"{way}/open has mode 0777" in (changeable(way / "good" / name) or ""), name
        assert f"{way}/open" in (changeable(way / "good" / name / "f") or ""), name
    (way / "open/back").symlink_to("../good")
    assert f"{way}/open" in (changeable(way / "open/back/f") or ""), (
        "the link could be swapped though what it points to could not"
    )
    assert f"{way}/open" in (changeable(way / "open/../good/f") or "")
    assert changeable(way / "good/../good/./f") is None
    (way / "good/fine").symlink_to("f")
    assert changeable(way / "good/fine") is None
    (way / "good/round").symlink_to("round")
    assert "too many links" in (changeable(way / "good/round") or "")
    monkeypatch.chdir(way / "good")
    assert changeable("f") is None
    assert "0777" in (changeable("../open/f") or "")


def test_what_is_not_there_yet_is_judged_by_where_it_would_be(way):
    assert changeable(way / "good/new/deeper") is None
    assert "0777" in (changeable(way / "open/new") or "")


def test_a_folder_is_judged_with_all_that_lies_in_it(way):
    inner = way / "good/images/cats"
    inner.mkdir(parents=True)
    (inner / "1.png").touch(0o600)
    assert changeable(way / "good") is None
    (inner / "1.png").chmod(0o606)
    assert "1.png has mode 0606" in (changeable(way / "good") or "")
    (inner / "1.png").unlink()
    (inner / "1.png").symlink_to(way / "open/f")
    assert f"{way}/open" in (changeable(way / "good") or "")


def test_a_sticky_folder_is_passed_through_and_nothing_is_kept_in_it(way):
    (way / "open").chmod(0o1777)
    (way / "open/mine").mkdir(0o700)
    assert changeable(way / "open/mine/f") is None
    for path in (way / "open/f", way / "open/new"):
        assert "every user may write" in (changeable(path) or "")
    (way / "open/link").symlink_to(way / "good")
    assert "every user may write" in (changeable(way / "open/link/f") or "")
    if os.getuid() == 0:
        os.chown(way / "open/mine", EVE, EVE)
        assert f"belongs to user {EVE}" in (changeable(way / "open/mine/f") or "")


def test_an_access_list_is_not_hidden_by_the_mode(way):
    entries = (
        (1, 6, 2**32 - 1),
        (2, 6, EVE),
        (4, 0, 2**32 - 1),
        (16, 6, 2**32 - 1),
        (32, 0, 2**32 - 1),
    )  # user:65533:rw-
    listed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(way / "good/f", "system.posix_acl_access", listed)
    except OSError:
        pytest.skip("this file system has no access lists")
    assert "setfacl -b" in (changeable(way / "good/f") or "")
    assert "could open it" in (exposed(str(way / "good/f"), EVE) or "")
    os.removexattr(way / "good/f", "system.posix_acl_access")
    (way / "good/f").chmod(0o600)
    assert changeable(way / "good/f") is exposed(str(way / "good/f"), EVE) is None


def test_a_folder_whose_new_files_would_get_an_access_list_is_refused(way):
    """The folder itself nobody else can write, and neither what is in it yet."""
    entries = (
        (1, 7, 2**32 - 1),
        (2, 7, EVE),
        (4, 5, 2**32 - 1),
        (16, 7, 2**32 - 1),
        (32, 5, 2**32 - 1),
    )  # default:user:65533:rwx
    try:
        os.setxattr(
            way / "good",
            "system.posix_acl_default",
            struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in entries),
        )
    except OSError:
        pytest.skip("this file system has no access lists")
    (way / "open").chmod(0o700)
    for path in (way / "good", way / "good/f", way / "good/new", way):
        assert "default access list" in (changeable(path) or ""), path
    os.removexattr(way / "good", "system.posix_acl_default")
    assert changeable(way / "good/f") is None


def test_others_come_to_a_file_if_every_folder_lets_them(way):
    way.chmod(0o711)
    assert reachable(str(way / "open/f"), EVE)
    assert not reachable(str(way / "good/f"), EVE)
    (way / "good").chmod(0o710)
    assert not reachable(str(way / "good/f"), EVE)
    assert reachable(str(way / "good/f"), (way / "good").stat().st_gid)
