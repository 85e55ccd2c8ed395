"""Each command of `python -m research` as its users type it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.text import Text

from research.commands import _comparison_tables

ROOT = Path(__file__).parents[2]


def test_a_spend_above_the_claim_is_rounded_up_and_red():
    row = {"curve": "mb-sgd-paper", "epsilon": 3.0, "test_error": 0.1, "standard_error": 0.01}
    for spent, wanted in ((2.471, Text("2.48")), (3.001, Text("3.01", style="red"))):
        paper = _comparison_tables([row | {"spent_epsilon": spent}], (3.0,))[1]
        (shown,) = paper.columns[4].cells
        assert (shown, shown.style) == (wanted, wanted.style)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("compare", "--epsilon", 0), "epsilon"),
        (("compare", "--out", "file/run"), "file/run"),
        (("compare", "--data", "mnist", "--data-dir", "nowhere", "--quick"), "nowhere"),
        (("figures", "mnist", "--reduced", "--cpu", "--data-dir", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_no_folder(research, tmp_path, words, reason):
    (tmp_path / "file").write_text("")
    code, _, err = research(*words)
    assert (code, err.count("\n")) == (2, 1), err
    assert reason in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_comparison_says_that_it_goes_on(tmp_path):
    """A real process, a real SIGINT once a batch of runs is stored."""
    process = subprocess.Popen(
        [sys.executable, "-m", "research", "compare", "--quick", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # what a shell starts in the background ignores it
    )
    results = tmp_path / "run/results.csv"
    deadline = time.monotonic() + 600
    while (
        not (results.exists() and ",done," in results.read_text()) and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "continues from there" in err
    assert "Traceback" not in err
    assert ",done," in results.read_text()
