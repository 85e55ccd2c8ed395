"""Algorithms in files of the user's own that go wrong: one sentence, before anybody is asked where
that can be known, and never more than was planned.
"""

import re

import pytest

from gates import ASKER, three_gates
from silodp.cli.app import main
from silodp.server.order import Order
from silodp.server.run import NetworkRun

FILE = """
from silodp import Gaussian, Grad, Query


def _steps(fed, problem, w, rounds, step, minibatch):
    for r in range(rounds):
        w = problem.prox(w - step * fed.mean(Query(Grad(w), minibatch.at(r))), step)
        yield w


def mine(fed, problem, w, *, rounds: int, step: float, minibatch: Gaussian):
    for v in _steps(fed, problem, w, rounds, step, minibatch):
        {line}
"""
SILENT = "if False: yield v"
CASES = {
    "1 / 0; yield v": r"mine.py:mine raised ZeroDivisionError in line \d+: division by zero; fix the algorithm",  # noqa: E501
    "raise KeyError; yield v": r"mine.py:mine raised KeyError in line \d+; fix the algorithm",
    "v @ v; yield v": r"mine.py:mine raised RuntimeError in line \d+: .*; fix the algorithm",
    "yield None": "mine.py:mine yields a NoneType; it must yield points of the shape of w",
    "yield v[:, :3]": (
        r"mine.py:mine yields a point of the shape \(1, 3\); it must yield points of the shape "
        r"of w, here \(1, 31\)"
    ),
    SILENT: "mine.py:mine yields no point; it must yield one for each iterate",
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    return tmp_path / "mine.py"


def silodp(capsys, *words) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["silodp", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    heard = capsys.readouterr()
    return int(ended.value.code or 0), " ".join((heard.out + heard.err).split())


def train(file) -> tuple:
    return (
        "train",
        "--data",
        "wbcd",
        "--algorithm",
        f"{file}:mine",
        "--model",
        "logistic",
        "--rounds",
        2,
        "--out",
        file.with_name("run"),
    )


@pytest.mark.parametrize("line", CASES)
def test_what_is_wrong_with_an_algorithm_is_said_in_a_sentence_and_nothing_is_left(
    file, capsys, line
):
    file.write_text(FILE.format(line=line))
    code, said = silodp(capsys, *train(file))
    assert (code, "Traceback" in said, said.count("silodp:")) == (2, False, 1)
    assert re.search(CASES[line], said), said
    assert not list(file.parent.glob("run/model*"))


def test_an_algorithm_that_asks_nothing_is_refused(file, capsys):
    file.write_text(
        "from silodp import Gaussian\n\n\ndef mine(fed, problem, w, *, step: float, "
        "minibatch: Gaussian):\n    yield w\n"
    )
    code, said = silodp(capsys, *train(file))
    assert (code, said) == (
        2,
        "silodp: the algorithm asks nothing; it must ask `fed`, or there is nothing to learn from",
    )


def test_an_error_of_the_package_is_not_blamed_on_the_file(file, monkeypatch):
    file.write_text(FILE.format(line="yield v"))
    monkeypatch.setattr("silodp.server.plan.Asked", lambda *given: 1 / 0)
    monkeypatch.setattr("sys.argv", ["silodp", *map(str, train(file))])
    with pytest.raises(ZeroDivisionError):
        main()


def test_a_file_that_ends_the_program_ends_nothing(file, capsys):
    file.write_text("import sys\nsys.exit(0)\n")
    code, said = silodp(capsys, *train(file))
    assert code == 2
    assert "cannot be run (SystemExit: 0); fix that file" in said


GREEDY = """
from silodp import Gaussian, Grad, Query


def mine(fed, problem, w, *, rounds: int, step: float, minibatch: Gaussian):
    for r in range(rounds):
        g = fed.mean(Query(Grad(w), minibatch.at(r)))
        yield w - step * g
        if bool(g.any()):
            fed.mean(Query(Grad(w), minibatch.at(r)))
"""
"""Asks once more after an answer that is not zero, which no dry run sees."""


def test_a_simulation_ends_where_its_algorithm_asks_for_more_than_was_planned(file, capsys):
    file.write_text(GREEDY)
    code, said = silodp(capsys, *train(file))
    assert code == 2
    assert (
        "asks for more releases of kind 'minibatch' than were planned; what it asks may "
        "not depend on answers"
    ) in said


def test_a_run_over_silos_ends_there_too_with_what_was_paid_for_and_within_its_epsilon(
    file, tmp_path
):
    file.write_text(GREEDY)
    with three_gates() as gates:
        order = Order(f"{file}:mine", epsilon=("2",), rounds=3, seed=0)
        run = NetworkRun(
            gates.cards, gates.problem, order, gates.direct(), tmp_path / "run", key=ASKER
        )
        assert len(list(run)) == 2
        assert "than were planned" in run.ended
        assert [
            sum(entry.act == "charge" for entry in gate.ledger().entries()) for gate in gates.gates
        ] == [3, 3, 3]
        assert all(gate.ledger().spent() <= 2.0 for gate in gates.gates)
    assert (tmp_path / "run" / "model.safetensors").exists()
