"""The command line, as an operator of a silo meets it."""

import pytest


@pytest.fixture
def silodp(silodp, monkeypatch, tmp_path):
    """Runs a command of `silodp silo`, or `of` another group: (exit code, standard output, standard
    error).
    """
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    return lambda *words, of=("silo",): silodp(*of, *words)
