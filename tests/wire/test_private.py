"""Engines by their front doors: every private part that is touched is on the list, and on the page;
without one nothing starts.
"""

import ast
from importlib import import_module
from pathlib import Path

import pytest

from silodp.core.errors import BadInput
from silodp.wire import private

WIRE = Path(private.__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forgotten():
    private.check.cache_clear()
    yield
    private.check.cache_clear()


def imported(source):
    """MODULE:NAME of every import of an engine's in a module, and MODULE of `import MODULE` and of
    modules imported by name.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in private.PRIVATE
        ):
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.split(".")[0] in private.PRIVATE
            )


def listed(name):
    """Whether the import is of a public module, or the list has it or something of it."""
    module, _, word = name.partition(":")
    if any(module == one or module.startswith(f"{one}.") for one in private.PUBLIC):
        return True
    parts = [part for parts in private.PRIVATE.values() for part in parts]
    return any(part == name or part.startswith((f"{name}.", f"{module}.{word}:")) for part in parts)


def test_every_part_of_an_engine_that_is_imported_is_public_or_listed():
    found = [name for file in WIRE.rglob("*.py") for name in imported(file.read_text())]
    assert len(found) > 40
    assert [name for name in found if not listed(name)] == []
    assert not listed("nvflare.private.fed.client.communicator:Communicator")
    assert list(imported("from flwr.server.app import x")) == ["flwr.server.app:x"]


@pytest.mark.parametrize(("engine", "extra"), [("nvflare", "nvflare"), ("flwr", "flower")])
def test_the_installed_engine_is_the_pinned_one_and_has_every_part(engine, extra):
    import tomllib

    pytest.importorskip(engine)
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        extra
    ]
    assert f"{engine}=={private.TRIED[engine]}" in pins
    private.check(engine)


@pytest.mark.parametrize("engine", ["nvflare", "flwr"])
def test_the_next_version_is_not_started(engine, monkeypatch):
    monkeypatch.setattr(private, "version", lambda name: "99.0.0")
    with pytest.raises(
        BadInput, match=f"{engine} 99.0.0 is installed, and silodp closes the holes of"
    ):
        private.check(engine)


@pytest.mark.parametrize(
    ("engine", "part"),
    [(engine, part) for engine, parts in private.PRIVATE.items() for part in parts],
)
def test_an_engine_that_lacks_a_part_is_not_started(engine, part, monkeypatch):
    pytest.importorskip(engine)
    private.check(
        engine
        # every module is there before the part is taken away: one that imports it would be the
        # first to fail
    )
    private.check.cache_clear()
    module, _, names = part.partition(":")
    *path, last = names.split(".")
    here = import_module(module)
    for name in path:
        here = getattr(here, name)
    monkeypatch.delattr(here, last)
    with pytest.raises(BadInput, match=f"has no {part}"):
        private.check(engine)


def test_a_server_whose_engine_is_another_ends_before_it_serves(monkeypatch):
    """As NVFlare tells its components: before anything listens."""
    pytest.importorskip("nvflare")
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.fl_exception import UnsafeComponentError

    from silodp.wire.nvflare import app

    ended = []
    monkeypatch.setattr(private, "version", lambda name: "99.0.0")
    monkeypatch.setattr(app.os, "_exit", ended.append)
    monkeypatch.setattr(app, "deafen", lambda engine: None)
    app.ServerHub("/nowhere", "/nowhere").handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
    assert ended == [2]
    with pytest.raises(UnsafeComponentError):
        app.Courier("/nowhere").handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())


def test_flowers_commands_end_with_2_under_another_flower(monkeypatch, capsys):
    from silodp.wire.flower import site

    monkeypatch.setattr(private, "version", lambda name: "99.0.0")
    monkeypatch.setattr(site.sys, "argv", ["site", "superlink", "/nowhere"])
    assert site.main() == 2
    assert "install flwr==1.41.0" in capsys.readouterr().err
