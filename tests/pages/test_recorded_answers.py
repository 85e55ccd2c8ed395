"""`silodp ui` lists recorded answers of `silodp stats`, with a page each."""

import json

import pytest
from looking import ask, served

from silodp.cli.recorded import Recorder

NORTH = {"name": "north", "epsilon": 3.0, "spent_epsilon": 2.5, "delta": 1e-5}
GROUPS = [{"name": name, "records": 40, "events": 9, "expected": 8.5} for name in ("a", "b")]
ANSWER = {"groups": GROUPS, "p": 0.25, "chi_squared": 1.3, "releases": []}


def recorded(folder, by, trust="masks"):
    silos = [NORTH, NORTH | {"name": "south", "spent_epsilon": 1.5}]
    answer = ANSWER | {"silos": silos, "trust": trust}
    Recorder.into(folder, "logrank", by=by).write(answer, quiet=True)


@pytest.fixture
def root(tmp_path):
    """Answers in two folders, one of them in a federation's."""
    recorded(tmp_path / "answers", "<b>ward</b>")
    recorded(tmp_path / "answers", "smoker", trust="isrl")
    recorded(tmp_path / "federation/statistics", "sex")
    return tmp_path


def test_the_list_has_each_recorded_answer_with_trust_price_and_time(root):
    with served(root) as port:
        for path in ("/", "/live"):
            page = ask(port, path)[1]
            assert page.count("/answer/") == 3
            assert "Log-rank test, by sex" in page
            assert "<b>ward" not in page
            assert "other silos" in page
            assert "nobody" in page
            assert ">2.5<" in page, "the most that a silo has spent"
            for line in (root / "answers/statistics.jsonl").read_text().splitlines():
                assert json.loads(line)["time"] in page


def test_each_recorded_answer_has_a_page_with_its_figures_and_its_price(root):
    with served(root) as port:
        status, page, _ = ask(port, "/answer/2/answers")
        assert status == 200
        assert "Log-rank test, by smoker" in page
        assert "expected if alike" in page
        assert "p = 0.2500" in page
        assert "south" in page
        assert "ward" not in page
        assert ask(port, "/answer/1/federation/statistics")[0] == 200


@pytest.mark.parametrize("name", ["0/answers", "3/answers", "1/none", "1/../answers", "x/answers"])
def test_a_name_without_an_answer_has_no_page(root, name):
    with served(root) as port:
        assert ask(port, f"/answer/{name}")[0] == 404


def test_a_damaged_record_hides_no_other(root):
    (root / "answers/statistics.jsonl").write_text('{"command": "logrank"}\n')
    with served(root) as port:
        page = ask(port, "/")[1]
        assert "cannot be read" in page
        assert "Log-rank test, by sex" in page
        assert ask(port, "/answer/1/answers")[0] == 404
