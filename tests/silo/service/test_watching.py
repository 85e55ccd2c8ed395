"""What a gate tells monitoring is alike for silos that differ in a record, and is told from a file,
since the gate has no network.
"""

import os
import signal

import pytest
from gate_process import STRANGER, Process, asked, made, write_data

from silodp.host import metrics


@pytest.fixture(autouse=True)
def told(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_METRICS", str(tmp_path / "gate.prom"))
    return tmp_path / "gate.prom"


def test_neighbours_that_are_asked_the_same_tell_the_same_numbers(tmp_path, told, monkeypatch):
    """One record is moved far away; the gate answers, repeats and refuses alike, and so does its
    page.
    """
    pages = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        data = write_data(folder / "own.csv")
        if seed:
            lines = data.read_text().splitlines()
            data.write_text("\n".join([*lines[:5], "1e6,-1e6,0.5,1", *lines[6:]]))
        silo = made(folder, data=data)
        gate = Process(silo, folder)
        for frame in (
            asked(silo, "q1"),
            asked(silo, "q1"),
            asked(silo, "q2", key=STRANGER),
            asked(silo, "q3", noise=0.01),
            b"nonsense",
        ):
            gate.reply(frame)
        assert gate.end(signal.SIGTERM) == 0
        pages.append(told.read_text())
    assert pages[0] == pages[1]
    for line in (
        'code="answered"} 1',
        'code="repeated"} 1',
        'code="asker"} 1',
        'code="noise"} 1',
        'code="malformed"} 1',
    ):
        assert f'silodp_frames_total{{role="gate",{line}' in pages[0]
    assert 'silodp_up{role="gate"} 0' in pages[0]
    assert os.stat(told).st_mode & 0o777 == 0o644
    assert {
        line.split("{")[0] for line in pages[0].splitlines() if not line.startswith("#")
    } <= set(metrics.METRICS)
