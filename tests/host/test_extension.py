"""FILE.py:NAME is found by its path, in any process, and what is wrong with it is said in a
sentence.
"""

import pickle
import subprocess
import sys

import pytest

from silodp.core.errors import BadInput
from silodp.host.extension import file_hash, load

CODE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class Level:
    height: float
    below: Level | None = None

def twice(x: float) -> float:
    return 2 * x
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path / "own.py"


def test_a_name_of_a_file_is_found_and_the_file_runs_once(file):
    assert load(f"{file}:twice")(3) == 6
    assert load(f"{file}:Level") is load(f"{file}:Level:0.5")
    assert load(f"{file}:Level")(1.0, None).height == 1.0


def test_what_is_found_is_named_alike_in_every_process(file):
    program = (
        f"from silodp.host.extension import load; print(load({str(file) + ':twice'!r}).__module__)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert other == load(f"{file}:twice").__module__
    assert other.endswith(file_hash(f"{file}:twice"))
    assert pickle.loads(pickle.dumps(load(f"{file}:Level")(2.0))).height == 2.0


@pytest.mark.parametrize(
    ("code", "name", "sentence"),
    [
        (None, "twice", "cannot be read"),
        ("", "twice", "has no 'twice'"),
        ("", "", "has no ''"),
        ("1 / 0", "twice", r"run \(ZeroDivisionError: division by zero\); fix that file$"),
        ("def twice(:", "twice", r"cannot be run \(SyntaxError"),
        ("import nobody_has_this", "twice", r"cannot be run \(ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path, code, name, sentence):
    if code is not None:
        (tmp_path / "own.py").write_text(code)
    with pytest.raises(BadInput, match=sentence):
        load(f"{tmp_path / 'own.py'}:{name}")
