"""A gate answers only where nothing says that it is paused: a look that fails is a pause."""

import errno
import os

import pytest

from silodp.silo.service.pause import NAME, Pause, paused, set_paused


@pytest.fixture
def policy(tmp_path):
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate/policy.toml").write_text("")
    return tmp_path / "gate/policy.toml"


@pytest.fixture
def look(policy):
    found = Pause(policy)
    yield found
    found.close()


def test_a_pause_is_seen_and_ends(policy, look):
    assert not look.on()
    for _ in range(2):
        set_paused(policy, True)
        assert look.on()
        assert paused(policy)
    for _ in range(2):
        set_paused(policy, False)
        assert not look.on()
        assert not paused(policy)


@pytest.mark.parametrize("new", [False, True], ids=["gone", "another in its place"])
def test_a_paused_gate_stays_paused_when_its_folder_is_renamed(policy, look, tmp_path, new):
    set_paused(policy, True)
    (tmp_path / "gate").rename(tmp_path / "away")
    if new:
        (tmp_path / "gate").mkdir()
    assert look.on()


def test_a_folder_that_is_not_to_be_found_pauses(policy, look, tmp_path):
    (tmp_path / "gate").rename(tmp_path / "away")
    assert look.on()
    assert paused(policy)
    (tmp_path / "gate").write_text("no folder")
    assert look.on()
    (tmp_path / "gate").unlink()
    (tmp_path / "gate").mkdir()
    assert not look.on()
    set_paused(policy, True)  # by its name, in the new folder
    assert look.on()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP])
@pytest.mark.parametrize("call", ["stat", "open"])
def test_a_look_that_fails_is_a_pause(policy, look, monkeypatch, number, call):
    def fail(*args, **more):
        raise OSError(number, os.strerror(number))

    before = getattr(os, call)
    monkeypatch.setattr(
        os,
        call,
        lambda path, *args, **more: (
            fail() if str(path) in (NAME, str(policy.parent)) else before(path, *args, **more)
        ),
    )
    assert look.on()
    assert paused(policy)


def test_a_link_that_is_pointed_elsewhere_takes_its_pause_along(policy, tmp_path):
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.toml").write_text("")
    policy.unlink()
    policy.symlink_to("../v1/policy.toml")
    look = Pause(policy)
    set_paused(policy, True)
    policy.unlink()
    policy.symlink_to("../v2/policy.toml")
    assert look.on()
    assert paused(policy)
    set_paused(policy, False)
    assert not look.on()
    set_paused(tmp_path / "v2/policy.toml", True)  # by its own name
    assert look.on()
    look.close()


def test_a_pause_is_not_written_through_a_link(policy, tmp_path):
    (policy.parent / NAME).symlink_to(tmp_path / "victim")
    set_paused(policy, True)
    assert paused(policy)
    assert not (tmp_path / "victim").exists()
