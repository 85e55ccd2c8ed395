"""Engines by their front doors: no private part of one is named, and a version that was not tested
is not started.
"""

import re
import tomllib
from pathlib import Path

import pytest

from silodp.cli import doctor
from silodp.core.errors import BadInput
from silodp.wire import versions
from silodp.wire.flower import site as flower_site

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(
    r"nvflare\.(private|fuel)\b"
    r"|flwr\.(superlink|supernode|supercore|common|proto|cli|server|client)\b"
)
"""Packages whose parts an engine's documentation does not offer to others."""


def test_no_private_part_of_an_engine_is_named_anywhere():
    files = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    found = [path for path in files if PRIVATE.search(path.read_text())]
    assert found == [Path(__file__)], "this very pattern"
    assert PRIVATE.search("from flwr.supercore.run import Run")
    assert not PRIVATE.search(
        "from flwr.serverapp import Grid; from flwr.clientapp import ClientApp"
    )


@pytest.mark.parametrize("engine", list(versions.TESTED))
def test_the_installed_engine_is_in_the_range_that_the_package_declares(engine):
    pytest.importorskip(engine)
    versions.check(engine)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (declared, *_) = extras["optional-dependencies"][versions.EXTRAS[engine]]
    oldest, newest = versions.TESTED[engine]
    minor = int(newest.split(".")[1])
    assert declared == f"{engine}>={oldest},<{newest.split('.')[0]}.{minor + 1}"
    assert versions.EXTRAS[engine] in doctor.ENGINES


@pytest.mark.parametrize(
    ("engine", "found", "fine"),
    [
        ("flwr", "1.40.9", False),
        ("flwr", "1.41.0", True),
        ("flwr", "1.42.3", True),
        ("flwr", "1.43.0", False),
        ("flwr", "2.0", False),
        ("nvflare", "2.8.9", False),
        ("nvflare", "2.9.1", True),
        ("nvflare", "2.10.0", False),
    ],
)
def test_versions_outside_the_tested_range_are_not_started(engine, found, fine, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: found)
    if fine:
        return versions.check(engine)
    with pytest.raises(BadInput, match=rf"{engine} {re.escape(found)} is not supported; install"):
        versions.check(engine)


def test_an_engine_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(BadInput, match=r"flwr is not installed; install silodp\[flower\]"):
        versions.check("flwr")


def test_flowers_commands_end_with_2_under_another_flower(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(versions, "version", lambda name: "99.0.0")
    monkeypatch.setattr(
        flower_site.sys, "argv", ["site", "server", str(tmp_path), "--hub", "/nowhere"]
    )
    assert flower_site.main() == 2
    assert "flwr 99.0.0 is not supported" in capsys.readouterr().err
