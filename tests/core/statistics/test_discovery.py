"""The lists of statistics and mechanisms come from the files of their packages."""

import ast
import dataclasses
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import silodp
from silodp.core import fields, mechanisms, statistics
from silodp.core.mechanisms import MECHANISMS, Mechanism
from silodp.core.protocol.canonical import read_named, write_named
from silodp.core.sampling import SAMPLINGS, Sampling
from silodp.core.statistics import STATISTICS, Statistic

NEW = """
from dataclasses import dataclass
from typing import ClassVar

from silodp.core.fields import INTEGER
from silodp.core.statistics.statistic import Statistic


@dataclass(frozen=True, eq=False)
class Novel(Statistic):
    size: int
    wire: ClassVar = {"size": INTEGER}
"""


def test_a_new_file_is_a_new_statistic_that_the_codec_can_write(tmp_path, monkeypatch):
    (tmp_path / "novel.py").write_text(NEW)
    path = [*statistics.__path__, str(tmp_path)]
    monkeypatch.setattr(statistics, "__path__", path)
    importlib.invalidate_caches()
    try:
        found = fields.discovered(Statistic, statistics.__name__, path)
        assert found.keys() - STATISTICS.keys() == {"Novel"}
        packed = write_named(found["Novel"](3), {})
        assert packed == {"name": "Novel", "size": 3}
        assert read_named(found, packed, {}).size == 3
    finally:
        sys.modules.pop(f"{statistics.__name__}.novel", None)


@pytest.mark.parametrize(
    ("package", "base", "listed"),
    [(statistics, Statistic, STATISTICS), (mechanisms, Mechanism, MECHANISMS)],
)
def test_every_frozen_kind_in_the_package_is_listed_with_all_its_fields(package, base, listed):
    for module in pkgutil.iter_modules(package.__path__):
        for kind in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, base) and dataclasses.is_dataclass(kind):
                assert listed[kind.__name__] is kind
                assert set(kind.wire) | {"sampling"} >= {
                    field.name for field in dataclasses.fields(kind)
                }


def test_what_nobody_says_is_denied():
    """A statistic goes into no total, and a sampling is priced by no exact rule, unless its own
    file says so.
    """
    assert not Statistic.in_totals
    assert Sampling.sampled
    assert not Sampling.whole
    assert {name for name, kind in STATISTICS.items() if kind.in_totals} == {
        "ClassCounts",
        "ClippedDiff",
        "Grad",
        "GradDiff",
        "Gram",
        "GroupClasses",
        "GroupScore",
        "Histogram",
        "Marginals",
        "MissingRates",
        "Moments",
        "Outcomes",
        "Regression",
        "RiskCells",
        "ScaledGrad",
        "Score",
    }
    assert {name for name, kind in SAMPLINGS.items() if not kind.sampled} == {
        "FullBatch",
        "DisjointBatches",
    }


def test_four_files_alone_ask_which_statistic_or_mechanism_it_is():
    """What differs between kinds is on the kinds themselves, or a new one would have to be known in
    many places. Noise alone is drawn by those who answer, who match the mechanism.
    """
    kinds, root, found = (
        {"Statistic", "Rowed", "Mechanism", *STATISTICS, *MECHANISMS},
        Path(silodp.__file__).parent,
        set(),
    )
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            asked = node.cls if isinstance(node, ast.MatchClass) else None
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "issubclass")
            ):
                asked = node.args[1]
            names = (
                {getattr(part, "id", getattr(part, "attr", None)) for part in ast.walk(asked)}
                if asked
                else set()
            )
            if names & kinds:
                found.add(path.relative_to(root).as_posix())
    assert found <= {
        "core/mechanisms/totals.py",
        "server/estimates/moments.py",
        "silo/answer/exact.py",
        "silo/answer/simulated.py",
    }
