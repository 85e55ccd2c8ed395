"""What the pages call modules, files and tests is there under that name."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(p for p in (ROOT / "deploy").rglob("*") if p.is_file()),
    *(ROOT / "examples").rglob("*.py"),
]
FOLDERS = "|".join(
    sorted(
        p.name for p in (ROOT / "src/silodp").iterdir() if p.is_dir() and p.name != "__pycache__"
    )
)


def modules(text):
    """Dotted names under silodp, and what is imported from them."""
    for where, names in re.findall(r"from (silodp(?:\.\w+)*) import ([\w, ]+)", text):
        yield from (f"{where}.{name.split()[0]}" for name in names.split(",") if name.strip())
    yield from re.findall(rf"(?<![\w/.-])silodp(?:\.(?:{FOLDERS}))(?:\.\w+)*", text)


def there(name):
    """Whether a dotted name is a module, or something in one."""
    parts, found = name.split("."), None
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[at:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def files(text):
    """Paths in the package, or of the tree, that stand in code."""
    for path in re.findall(
        rf"`((?:src/silodp/)?(?:{FOLDERS}|tests|docs|examples|deploy|benchmarks)/[\w/.-]*)`", text
    ):
        yield path.rstrip("/")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_and_file_that_a_page_names_exists(page):
    text = page.read_text()
    own = set(re.findall(r'```python title="(\w+)\.py"', text))  # files that the page itself shows
    assert [
        name for name in modules(text) if not there(name) and not own & set(name.split("."))
    ] == []
    assert [
        path
        for path in files(text)
        if not any((base / path).exists() for base in (ROOT, ROOT / "src/silodp", page.parent))
    ] == []


def test_every_test_that_a_page_names_exists():
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.read_text()))
        assert named <= defined, f"{page.name}: {named - defined}"


def test_the_check_of_names_can_fail():
    assert list(
        modules("from silodp.core.query import Query, Grad as G\n`silodp.simulation.nowhere`")
    )[:2] == [
        "silodp.core.query.Query",
        "silodp.core.query.Grad",
    ]
    assert there("silodp.core.query.Query")
    assert not there("silodp.simulation.nowhere")
    assert not there("silodp.core.query.Nothing")
    assert list(files("`core/query.py` and `silo/answer/`, not `policy.toml`")) == [
        "core/query.py",
        "silo/answer",
    ]


def test_every_code_of_a_refusal_has_a_line_that_says_what_to_do():
    from silodp.core.protocol.refusals import CODES

    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert [code for code in CODES if f"`{code}`" not in page] == []


def test_the_words_that_help_texts_use_are_in_the_glossary():
    page = (ROOT / "docs/glossary.md").read_text()
    words = (
        "Silo",
        "Record",
        "Gate",
        "Courier",
        "Release",
        "Ledger",
        "Clip",
        "Phase",
        "mu",
        "Shuffler",
        "Masks",
        "Asker",
        "Schema",
        "Policy",
        "Officer",
        "Study",
        "Witness",
        "Cohort",
        "Frame",
        "Rule",
    )
    assert [word for word in words if f"- **{word}**" not in page] == []
    listed = [word.lower() for word in re.findall(r"^- \*\*(.+?)\*\*", page, re.MULTILINE)]
    assert listed == sorted(set(listed)), "in the order of the alphabet, each word once"


def test_the_glossary_is_named_by_the_help_and_linked_from_where_people_begin(silodp):
    assert "docs/glossary.md" in silodp("--help")[1]
    for page in (
        "README.md",
        "docs/index.md",
        "docs/privacy.md",
        "docs/howto.md",
        "docs/protocol.md",
        "docs/promises/charge-first.md",
    ):
        assert "glossary.md" in (ROOT / page).read_text(), page


def test_the_table_of_versions_has_the_numbers_of_this_code():
    """A frame, ledger or journal of another number needs a row of its own, and a thought about who
    may talk to whom.
    """
    from silodp import __version__
    from silodp.core.protocol.frames import VERSION as FRAMES
    from silodp.server.journal import VERSION as JOURNAL
    from silodp.silo.ledger import chain
    from silodp.wire.versions import TESTED

    ranges = [" to ".join(dict.fromkeys(TESTED[engine])) for engine in ("nvflare", "flwr")]
    ledger = re.search(r"silodp ledger (\d+) ", inspect.getsource(chain.hashed))[1]
    row = [__version__.rpartition(".")[0], str(FRAMES), ledger, str(JOURNAL), *ranges]
    assert f"| {' | '.join(row)} |" in (ROOT / "docs/day-two.md").read_text()
