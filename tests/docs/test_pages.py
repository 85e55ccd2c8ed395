"""The pages hold: their examples compute what they say, every algorithm has its page and figure,
and the site builds without a warning.
"""

import ast
import doctest
import html
import re
import runpy
from pathlib import Path

import pytest

from silodp.server.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
in_one_place = pytest.mark.xdist_group(
    "browser"
)  # the site is built once, for these and for whoever looks at it
SPOKEN = sorted(page for page in DOCS.rglob("*.md") if ">>> " in page.read_text())


@pytest.mark.parametrize("page", SPOKEN, ids=lambda p: p.name)
def test_the_examples_of_a_page_compute_what_it_says(page):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert failed == 0, f"{failed} of {tried} examples in {page.name}, printed above"
    assert tried > 3


def test_pages_with_examples_are_found():
    assert {"corrections.md", "extending.md", "guarantees.md"} <= {page.name for page in SPOKEN}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page_with_its_source_its_figure_and_a_command(name):
    page = (DOCS / "algorithms" / f"{name}.md").read_text()
    source = Path(ALGORITHMS[name].run.__code__.co_filename)
    assert f'--8<-- "server/algorithms/{source.name}"' in page
    assert (ROOT / "src/silodp/server/algorithms" / source.name).is_file()
    assert f"({name}.svg)" in page
    assert (DOCS / "algorithms" / f"{name}.svg").stat().st_size > 5_000
    assert f"--algorithm {name} " in page
    for heading in (
        "## The step",
        "## Guarantee",
        "## When to use it",
        "## Source",
        "## A picture of its steps",
    ):
        assert heading in page
    assert f"[{name}]({name}.md)" in (DOCS / "algorithms/index.md").read_text()


def test_a_figure_is_drawn_by_its_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    drawn = runpy.run_path(str(DOCS / "make_figures.py"))["draw"]("mb-sgd", tmp_path)
    assert drawn.read_text().startswith("<?xml")
    assert "mb-sgd, epsilon 1" in drawn.read_text()
    assert "mb-sgd, epsilon 1" in (DOCS / "algorithms/mb-sgd.svg").read_text()


def test_every_page_of_corrections_that_is_linked_to_exists():
    """MkDocs checks this too, where it is installed."""
    text = (DOCS / "corrections.md").read_text()
    slugs = {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    links = {
        link
        for page in DOCS.rglob("*.md")
        for link in re.findall(r"corrections\.md#([\w-]+)", page.read_text())
    }
    assert links
    assert links <= slugs


@in_one_place
def test_the_site_builds_without_a_warning_and_fetches_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        assert not re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(?:https?:)?//', text
        ), page.name
    assert not [
        css
        for css in site.rglob("*.css")
        if re.search(r"url\(['\"]?(?:https?:)?//", css.read_text())
    ]
    assert "Quickstart" in (site / "search/search_index.json").read_text()


@in_one_place
def test_every_letter_and_sign_of_a_formula_is_in_the_font_that_comes_with_the_site(site):
    ttlib = pytest.importorskip("fontTools.ttLib")
    font = ttlib.TTFont(site / "fonts/stix-two-math.woff")
    known, missing = font.getBestCmap(), {}
    assert "MATH" in font
    for page in site.rglob("*.html"):
        for formula in re.findall(r"<math.*?</math>", page.read_text(), re.DOTALL):
            letters = {*html.unescape(re.sub(r"<[^>]*>|\s", "", formula))}
            italic = {
                chr(ord(letter) + 0x1D44E - ord("a"))
                for letter in re.findall(r"<mi>([a-z])</mi>", formula)
                if letter != "h"
            }
            missing |= {
                letter: page.name for letter in letters | italic if ord(letter) not in known
            }
    assert not missing


@in_one_place
def test_formulas_are_mathml_and_excerpts_are_the_source(site):
    page = (site / "algorithms/spider.html").read_text()
    assert page.count("<math") > 5
    assert "arithmatex" not in page
    assert "def" in page
    assert "prox_spider" in page
    assert "--8&lt;--" not in page


@in_one_place
def test_a_line_of_the_site_ends_inside_no_option_and_blocks_of_code_are_as_written(site):
    page = (site / "index.html").read_text()
    assert 'silodp init trial <span class="option">--demo</span></code>' in page
    assert ".option { white-space: nowrap; }" in (site / "style.css").read_text()
    page = (site / "deploy.html").read_text()
    blocks = "".join(re.findall(r"<pre>.*?</pre>", page, re.DOTALL))
    assert "--system" in blocks
    assert 'class="option"' not in blocks


@in_one_place
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("four_hospitals", r"<td>0\.9\d"),
        ("first_table", r"age, median \[IQR\]"),
        ("frozen_encoder", r"encoder, masks +epsilon 1: +1\d\.\d % errors"),
        ("new_algorithm", r"north\W+\(1\.99"),
    ],
)
def test_a_notebook_was_run_and_its_page_shows_what_came_of_it(site, name, said):
    """A cell that fails would have stopped the build."""
    page = (site / f"notebooks/{name}.html").read_text()
    assert re.search(said, re.sub(r"</?span[^>]*>", "", page))
    assert (site / f"notebooks/{name}-1.png").stat().st_size > 5_000
    assert f"{name}-1.png" in page
    assert '"execution_count": 1' in (site / f"notebooks/{name}.ipynb").read_text()


def test_the_gallery_shows_every_notebook_and_example_with_a_picture_and_its_time():
    page = (DOCS / "gallery.md").read_text()
    notebooks, programs = (
        sorted((DOCS / "notebooks").glob("*.py")),
        sorted((ROOT / "examples").glob("*.py")),
    )
    links = {f"(notebooks/{path.stem}-1.png)](notebooks/{path.stem}.md)" for path in notebooks}
    links |= {
        f"(gallery/{path.stem}.svg)](../examples/{path.name})"
        for path in programs
        if path.stem != "digits_cnn"
    }
    assert [link for link in links if link not in page] == []
    assert len(
        re.findall(r"^\*\*\[.*\)\*\*: (?:\w+ )+(?:seconds|minute)", page, re.MULTILINE)
    ) == len(links)
    assert {path.stem for path in (DOCS / "gallery").glob("*.svg")} == {
        path.stem for path in programs
    } - {"digits_cnn"}


@in_one_place
def test_what_the_root_package_offers_is_in_the_reference(site):
    tree = ast.parse((ROOT / "src/silodp/__init__.py").read_text())
    home = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    )
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    missing = [
        name
        for name, where in home.items()
        if name != "ALGORITHMS" and f'id="silodp.{where}.{name}"' not in text
    ]
    assert not missing
