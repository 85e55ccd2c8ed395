"""Every promise of SECURITY.md has a page of its own, in its own words, and no page promises
more.
"""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKER = runpy.run_path(str(ROOT / "docs/make_promises.py"))


def test_the_pages_are_those_that_the_promises_make():
    made = MAKER["pages"]()
    found = {path.name: path.read_text() for path in (ROOT / "docs/promises").glob("*.md")}
    assert found == made, (
        "SECURITY.md or promises.toml has changed: run `python docs/make_promises.py`"
    )
    assert len(made) == len(MAKER["rows"]()) + 1


def test_a_promise_without_a_page_and_a_page_without_a_promise_are_named(monkeypatch):
    """The list is read anew, with one row too many or too few."""
    rows, names = MAKER["rows"](), MAKER["pages"].__globals__
    monkeypatch.setitem(names, "rows", lambda: [*rows, ("A gate sings", ["test_it_sings"])])
    with pytest.raises(ValueError, match="0 entries for 'A gate sings'"):
        MAKER["pages"]()
    monkeypatch.setitem(names, "rows", lambda: rows[1:])
    with pytest.raises(ValueError, match=r"which SECURITY\.md does not promise"):
        MAKER["pages"]()


INDEX = (ROOT / "docs/promises/index.md").read_text()


@pytest.mark.parametrize(
    "name",
    sorted(path.name for path in (ROOT / "docs/promises").glob("*.md") if path.name != "index.md"),
)
def test_a_page_says_how_what_is_not_covered_and_what_goes_red_and_its_group_for_whom(name):
    text = (ROOT / "docs/promises" / name).read_text()
    for part in ("**How it is kept.** ", "**Not covered.** ", "- `test_"):
        assert part in text
    (title,) = re.findall(r"what is assumed:\*\* see \[(.+)\]\(index\.md#[a-z-]+\)", text)
    (group,) = [part for part in INDEX.split("\n## ") if part.startswith(f"{title}\n")]
    for part in ("**For whom.** ", "**Assumed.** ", f"]({name})"):
        assert part in group
