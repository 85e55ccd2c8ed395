"""The notebooks of docs/notebooks: sources without outputs, that use what is documented.
test_pages.py runs them, with the site that shows them.
"""

import re
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.py"))
REFERENCE = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))


def test_there_are_four_and_no_output_is_stored():
    assert {path.stem for path in NOTEBOOKS} == {
        "first_table",
        "four_hospitals",
        "frozen_encoder",
        "new_algorithm",
    }
    assert [
        path.name for path in (ROOT / "docs/notebooks").iterdir() if path.suffix not in (".py", "")
    ] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_says_first_in_plain_words_what_it_does_and_how_long_it_takes(path):
    first = jupytext.read(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    assert re.search(r"\*\*About \w+ seconds\*\*", first.source)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_uses_the_public_interface_alone(path):
    text = path.read_text()
    modules = set(re.findall(r"from (silodp(?:\.\w+)+) import", text))
    assert [name for name in modules if f"::: {name}" not in REFERENCE] == []
    assert not re.search(r"\._\w|import _", text)
