"""The one writer of files: whole or not there, for its owner alone, never through a link, and never
over what must not be written over.
"""

import os
import re
import stat
from pathlib import Path

import pytest

import silodp
from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.host.keys import make_key, public, read_key


def test_a_file_that_is_written_is_new_and_its_owners_alone_whatever_was_there(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "a").symlink_to(victim)
    atomic.write(tmp_path / "a", "one")
    atomic.write(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_text() == "two"
    assert not (tmp_path / "a").is_symlink()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert victim.read_text() == "untouched"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "victim"}


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, call):
    atomic.write(tmp_path / "a", "before")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space"):
        atomic.write(tmp_path / "a", "after")
    monkeypatch.undo()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "before")]


def test_content_is_synced_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    calls = []
    for name in ("write", "fsync", "replace"):
        own = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, own=own, name=name: (calls.append(name), own(*args))[1]
        )
    atomic.write(tmp_path / "a", "text")
    assert calls == ["write", "fsync", "replace", "fsync"]


def test_new_files_are_all_there_or_none_and_write_over_nothing(tmp_path):
    (tmp_path / "c").symlink_to(tmp_path / "nowhere")
    sentence = "c cannot be made: File exists; silodp does not overwrite files"
    with (
        pytest.raises(BadInput, match=sentence),
        atomic.new_files(tmp_path, {"a": "1", "b/d": "2", "c": "3"}),
    ):
        pytest.fail("the body ran")
    no_folder = tmp_path / "a file"
    no_folder.write_text("")
    with (
        pytest.raises(BadInput, match="cannot be made: Not a directory; choose another path"),
        atomic.new_files(no_folder / "b", {"a": "1"}),
    ):
        pytest.fail("the body ran")
    with pytest.raises(BadInput, match="of its own"), atomic.new_files(tmp_path, {"a": "1"}):
        raise BadInput("of its own")
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b/d").exists()
    assert not (tmp_path / "nowhere").exists()
    with atomic.new_files(tmp_path, {"a": "1", "b/d": "2"}):
        assert (tmp_path / "a").read_text() == "1"
    assert (tmp_path / "b/d").read_text() == "2"


def test_a_key_is_made_once_and_read_back_and_a_bad_file_is_said(tmp_path):
    made = make_key(tmp_path / "k/own.key")
    assert stat.S_IMODE((tmp_path / "k/own.key").stat().st_mode) == 0o600
    assert public(read_key(tmp_path / "k/own.key")) == public(made)
    with pytest.raises(BadInput, match="silodp does not overwrite files"):
        make_key(tmp_path / "k/own.key")
    with pytest.raises(BadInput, match=r"missing\.key cannot be read: No such file"):
        read_key(tmp_path / "missing.key")
    for text in ("", "11" * 31, "11" * 33, "zz" * 32, "é" * 64):
        (tmp_path / "bad.key").write_text(text)
        with pytest.raises(BadInput, match="must contain 64 hexadecimal digits"):
            read_key(tmp_path / "bad.key")


def test_files_are_written_by_one_writer():
    """A file that is written in place is half there after a crash. Lines that are added to a file,
    and a lock's, are no such files.
    """
    by_hand = re.compile(
        r"\.write_text\(|\.write_bytes\(|\bsave_file\(|\.open\(\"w|open\([^)]*, "
        r"\"w|json\.dump\(|\.savefig\(\s*[^d\s]"
    )
    known = {
        "host/atomic.py",
        "audit/report.py",
        "wire/flower/site.py",
    }
    root = Path(silodp.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if by_hand.search(path.read_text())
    }
    assert found <= known, "use silodp.host.atomic"
