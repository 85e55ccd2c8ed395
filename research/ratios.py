"""Ratios by private releases beside pooled fits without privacy: `python -m research ratios`.

The pooled fits are those of lifelines (Cox) and statsmodels (logistic and Poisson), on the same
columns in their own units. The error of a private fit is the root mean square of its differences to
the pooled coefficients, in the pooled standard errors, over all coefficients and seeds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from silodp import stats
from silodp.core.errors import BadInput

PRICES = ((1.0, "isrl"), (3.0, "isrl"), (1.0, "masks"), (3.0, "masks"))
SMALL = 300
"""Rows of each of six silos in the small study."""
NEEDED = "install research/ratios-requirements.txt with pip, in an environment of its own"
ASK = {"cox": stats.cox, "logistic": stats.logistic, "poisson": stats.poisson}


@dataclass(frozen=True)
class Study:
    """One comparison: the model, the rows with the silo of each, and the public schema."""

    kind: str
    rows: Any
    silos: np.ndarray
    schema: Mapping[str, Any]

    @property
    def frames(self) -> dict[str, Any]:
        """Return the rows of each silo."""
        names = sorted(set(self.silos))
        return {str(name): self.rows[self.silos == name] for name in names}

    @property
    def design(self) -> Any:
        """Return the columns of the model in own units. The first category has no column."""
        columns = {}
        for name, column in self.schema["columns"].items():
            if column["type"] == "number":
                columns[name] = self.rows[name].astype(float)
                continue
            for value in column["categories"][1:]:
                columns[f"{name}={value}"] = (self.rows[name] == value).astype(float)
        return pd.DataFrame(columns)


@dataclass(frozen=True)
class Pooled:
    """A fit of all rows without privacy."""

    value: Any
    error: Any


# --- the tables ----------------------------------------------------------------------------------


def dialysis(folder: Path) -> Study:
    """Return Dialysis of SurvSet: 67 centres of Rio de Janeiro in six silos."""
    table = _survset("Dialysis")
    diseases = ["hypert", "renal", "diabetes", "other", "congen"]
    columns = {
        "age": _number(0, 100),
        "begin": _number(0, 45),
        "disease": {"type": "category", "categories": diseases},
    }
    rows = pd.DataFrame(
        {
            "age": table.num_age,
            "begin": table.num_begin,
            "disease": table.fac_disease.astype(str),
            "months": table.time,
            "died": _yes(table.event == 1),
        }
    )
    centres = pd.factorize(table.fac_center.astype(str), sort=True)[0]
    return Study("cox", rows, centres % 6, _survival(columns, "months", [3, 6, 12, 18, 24, 36, 44]))


def small_dialysis(folder: Path) -> Study:
    """Return six silos of 300 rows of Dialysis, with two columns."""
    whole = dialysis(folder)
    chosen = np.random.default_rng(0).permutation(len(whole.rows))[: 6 * SMALL]
    rows = whole.rows.iloc[chosen].drop(columns="disease")
    columns = {name: whole.schema["columns"][name] for name in ("age", "begin")}
    schema = dict(whole.schema) | {"columns": columns}
    return Study("cox", rows, np.repeat(np.arange(6), SMALL), schema)


def leukaemia(folder: Path) -> Study:
    """Return LeukSurv of SurvSet: 24 districts of north-west England in six silos."""
    table = _survset("LeukSurv")
    columns = {
        "age": _number(0, 100),
        "sex": {"type": "category", "categories": ["0", "1"]},
        "wbc": _number(0, 500),
        "tpi": _number(-10, 10),
    }
    rows = pd.DataFrame(
        {
            "age": table.num_age,
            "sex": table.fac_sex.astype(str),
            "wbc": table.num_wbc,
            "tpi": table.num_tpi,
            "days": table.time,
            "died": _yes(table.event == 1),
        }
    )
    districts = table.fac_district.astype(int).to_numpy()
    edges = [30, 90, 180, 365, 730, 1826, 5000]
    return Study("cox", rows, districts % 6, _survival(columns, "days", edges))


def breast(folder: Path) -> Study:
    """Return TCGA-BRCA: patients by region of the hospital, as FLamby has them."""
    table: Any = _read(folder / "hospitals/tcga_brca/brca.csv")
    centres: Any = _read(folder / "hospitals/tcga_brca/centers.csv")
    columns = {"age": _number(18, 100), "late": {"type": "category", "categories": ["no", "yes"]}}
    late = table[[name for name in table if name.startswith("tumor_stage_stage iii")]].sum(axis=1)
    rows = pd.DataFrame(
        {
            "age": table.age_at_index,
            "late": _yes(late > 0),
            "days": table["T"].clip(lower=1),
            "died": _yes(table.E == 1),
        }
    )
    regions = dict(zip(centres["TSS Code"], centres["Region"], strict=True))
    silos = table.pid.str[5:7].map(regions)
    known = silos.notna() & rows.age.notna()
    edges = [365, 730, 1095, 1826, 3652, 9125]
    schema = _survival(columns, "days", edges)
    return Study("cox", rows[known], silos[known].to_numpy(), schema)


def any_visit(folder: Path) -> Study:
    """Return RAND HIE of statsmodels in six silos: was there any visit to a doctor?"""
    rows, columns, silos = _rand()
    rows["visit"] = _yes(rows.mdvis > 0)
    label = {"column": "visit", "task": "binary", "classes": ["no", "yes"]}
    return Study("logistic", rows.drop(columns="mdvis"), silos, _schema(columns, label))


def visits(folder: Path) -> Study:
    """Return RAND HIE of statsmodels in six silos: how many visits to a doctor were there?"""
    rows, columns, silos = _rand()
    label = {"column": "mdvis", "task": "count", "most": 77}
    return Study("poisson", rows, silos, _schema(columns, label))


STUDIES: dict[str, Callable[[Path], Study]] = {
    "Dialysis, Cox": dialysis,
    "Dialysis, Cox, 6 silos of 300": small_dialysis,
    "LeukSurv, Cox": leukaemia,
    "TCGA-BRCA, Cox": breast,
    "RAND HIE, any visit, logistic": any_visit,
    "RAND HIE, visits, Poisson": visits,
}


def _rand() -> tuple[Any, dict[str, Any], np.ndarray]:
    """Return the rows of RAND HIE, six columns of it, and a silo for each row at random."""
    table = _module("statsmodels.api").datasets.randhie.load_pandas().data
    columns = {
        "lncoins": _number(0, 5),
        "lpi": _number(0, 8),
        "fmde": _number(0, 10),
        "disea": _number(0, 60),
        "idp": {"type": "category", "categories": ["0", "1"]},
        "physlm": {"type": "category", "categories": ["0", "1"]},
    }
    rows = table[[*columns, "mdvis"]].copy()
    rows["idp"] = rows.idp.astype(int).astype(str)
    rows["physlm"] = np.where(rows.physlm > 0.5, "1", "0")
    silos = np.random.default_rng(0).permutation(len(rows)) % 6
    return rows, columns, silos


def _survset(name: str) -> Any:
    """Return a table of the package SurvSet."""
    return _module("SurvSet.data").SurvLoader().load_dataset(ds_name=name)["df"]


def _module(name: str) -> Any:
    """Return a package that silodp does not depend on. Raise BadInput if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise BadInput(f"the package {package} is not installed; {NEEDED}") from None


def _read(path: Path) -> Any:
    """Return a CSV file. Raise BadInput if it is not there."""
    try:
        return pd.read_csv(path)
    except OSError:
        raise BadInput(
            f"{path} cannot be read; get the tables of TCGA-BRCA from FLamby, and give their "
            "folder with --data-dir"
        ) from None


def _number(low: float, high: float) -> dict[str, Any]:
    return {"type": "number", "range": [low, high]}


def _yes(happened: Any) -> np.ndarray:
    return np.where(happened, "yes", "no")


def _schema(columns: Mapping[str, Any], label: Mapping[str, Any]) -> dict[str, Any]:
    return {"columns": dict(columns), "label": dict(label)}


def _survival(columns: Mapping[str, Any], time: str, edges: Sequence[float]) -> dict[str, Any]:
    label = {"task": "survival", "time": time, "event": "died", "edges": list(edges)}
    return _schema(columns, label)


# --- the fits ------------------------------------------------------------------------------------


def pooled(study: Study) -> Pooled:
    """Return the fit of all rows without privacy, by lifelines or statsmodels."""
    design = study.design
    label = study.schema["label"]
    if study.kind == "cox":
        fitter = _module("lifelines").CoxPHFitter()
        about = {"time": study.rows[label["time"]], "event": study.rows.died == "yes"}
        fitter.fit(design.assign(**about), "time", "event")
        return Pooled(fitter.params_, fitter.standard_errors_)
    models = _module("statsmodels.api")
    x = models.add_constant(design)
    if study.kind == "logistic":
        fit = models.Logit(study.rows[label["column"]] == "yes", x).fit(disp=False)
    else:
        fit = models.Poisson(study.rows[label["column"]], x).fit(disp=False)
    return Pooled(fit.params.drop("const"), fit.bse.drop("const"))


def private(study: Study, epsilon: float, trust: str, seed: int) -> Any:
    """Return the coefficients of a private fit, or None where the noise decides the answer."""
    settings = {"epsilon": epsilon, "trust": trust, "seed": seed}
    try:
        answer = ASK[study.kind](study.frames, schema=study.schema, **settings)
    except BadInput as hidden:
        if "the noise hides" not in str(hidden):
            raise
        return None
    return answer.table.coef.drop("constant", errors="ignore")


def concordance(study: Study, value: Any) -> float | None:
    """Return the c-index of these coefficients on all rows, or None for two classes."""
    line = study.design[value.index] @ value
    index = _module("lifelines.utils").concordance_index
    label = study.schema["label"]
    if study.kind == "cox":
        return float(index(study.rows[label["time"]], -line, study.rows.died == "yes"))
    if study.kind == "poisson":
        return float(index(study.rows[label["column"]], line))
    return None


def compare(name: str, folder: Path, seeds: int) -> str:
    """Return the row of a table in Markdown."""
    study = STUDIES[name](folder)
    known = pooled(study)
    cells = []
    ranks: list[float] = []
    for epsilon, trust in PRICES:
        fits = [private(study, epsilon, trust, seed) for seed in range(seeds)]
        found = [fit for fit in fits if fit is not None]
        cells.append(_cell(found, known, seeds))
        if (epsilon, trust) == PRICES[-1]:
            ranks = [rank for fit in found if (rank := concordance(study, fit)) is not None]
    size = f"{len(study.rows):,} in {len(set(study.silos))}, {len(known.value)}"
    own = concordance(study, known.value)
    order = f"{np.mean(ranks):.3f} ({own:.3f})" if ranks else "-"
    return f"| {name} | {size} | {' | '.join(cells)} | {order} |"


def _cell(found: Sequence[Any], known: Pooled, seeds: int) -> str:
    """Return the error of the fits, and how many of the questions had no answer."""
    if not found:
        return "no answer"
    apart = np.stack([(fit[known.value.index] - known.value) / known.error for fit in found])
    error = f"{np.sqrt((apart**2).mean()):.1f}"
    if len(found) < seeds:
        error += f" ({seeds - len(found)} of {seeds} without answer)"
    return error


def table(names: Sequence[str], folder: Path, seeds: int) -> Iterator[str]:
    """Yield the lines of the table in docs/regression.md."""
    prices = " | ".join(f"epsilon {epsilon:g}, {trust}" for epsilon, trust in PRICES)
    last = "c-index, epsilon 3, masks (pooled)"
    yield f"| data | rows, silos, features | {prices} | {last} |"
    yield "|" + "---|" * (len(PRICES) + 3)
    for name in names:
        yield compare(name, folder, seeds)
