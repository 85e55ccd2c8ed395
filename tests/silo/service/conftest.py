"""The command line, as an operator of a silo meets it."""

import pytest

from silodp.cli import app as cli


@pytest.fixture
def silodp(monkeypatch, capsys, tmp_path):
    """Runs a command as the shell does: (exit code, standard output, standard error)."""
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))

    def run(*words, of=("silo",)) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["silodp", *of, *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run
