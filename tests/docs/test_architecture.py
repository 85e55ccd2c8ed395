"""The walks of ARCHITECTURE.md and docs/resuming.md name files and definitions that exist, and
each hop's code names what its arrow points to.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
RESUMING = (ROOT / "docs/resuming.md").read_text()
HOP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`([^>\n]*)(?:->(.*))?$", re.MULTILINE)
HOPS = [
    (file, name, tuple(re.findall(r"`(\w+)`", after or "")))
    for file, name, _, after in HOP.findall(TEXT + RESUMING)
]


def definition(file, name):
    """The source of a class, function or Class.method; a decorator's text belongs to it."""
    text = (ROOT / "src/silodp" / file).read_text()
    nodes = ast.parse(text).body
    for part in name.split("."):
        found = [n for n in nodes if getattr(n, "name", None) == part]
        assert found, f"{file} has no {name}"
        nodes = found[0].body
    return ast.get_source_segment(text, found[0])


def test_every_numbered_line_of_the_walks_is_read():
    walks = TEXT[TEXT.index("## 4.") : TEXT.index("## 5.")] + RESUMING
    assert len(HOPS) == len(re.findall(r"^\d+\. ", walks, re.MULTILINE)) > 20


@pytest.mark.parametrize(
    ("file", "name", "names"), HOPS, ids=[f"{file}:{name}" for file, name, _ in HOPS]
)
def test_a_hop_is_where_the_walk_says_and_leads_on(file, name, names):
    source = definition(file, name)
    assert [word for word in names if not re.search(rf"\b{word}\b", source)] == []


def test_files_and_folders_that_the_page_names_are_there():
    named = {
        path.rstrip("/")
        for path in re.findall(
            r"`((?:core|engine|host|silo|shuffler|server|wire|pages|testing|simulation|audit|cli)/[\w/.]*)`",
            TEXT,
        )
    }
    assert [path for path in sorted(named) if not (ROOT / "src/silodp" / path).exists()] == []
