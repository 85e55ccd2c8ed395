"""Children of silodp have no empty or relative entry of PYTHONPATH."""

import os
import sys

import pytest

from silodp.host.python_path import child_environment, leave_out_current_folder

PATHS = {
    "": None,
    ":": None,
    ".": None,
    "/a:": "/a",
    ":/a": "/a",
    "/a::/b": "/a:/b",
    "/a:lib:./c:../d:/b": "/a:/b",
}


@pytest.mark.parametrize(("given", "left"), PATHS.items())
def test_a_child_gets_the_absolute_entries_alone(monkeypatch, given, left):
    monkeypatch.setenv("PYTHONPATH", given)
    assert child_environment().get("PYTHONPATH") == left
    assert child_environment()["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"] == given


def test_the_path_of_this_process_loses_what_such_entries_put_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/a::lib")
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), f"{tmp_path}/lib", "rel", "/b"])
    leave_out_current_folder()
    assert sys.path == ["/a", "/b"]


def test_a_folder_that_an_absolute_entry_names_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/b"])
    leave_out_current_folder()
    assert sys.path == [str(tmp_path), "/b"]


def test_without_such_an_entry_the_path_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/b"])
    leave_out_current_folder()
    assert sys.path == [str(tmp_path), "/b"]
