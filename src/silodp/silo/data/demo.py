"""Make four imaginary hospitals for trying things out, from a formula and a seed.

No record is of a real person. The hospitals differ as real ones do: one has 3,000 patients and
another 150. Between one in eight and one in five patients are readmitted. Each file has another
order of columns and other marks for missing values. One file has a column that no other has.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("age", "sex", "systolic", "smoker", "ward", "readmitted")
HOSPITALS = {
    "north": (3000, -2.6, COLUMNS, ("yes", "no", "")),
    "south": (
        1200,
        -2.5,
        ("readmitted", "ward", "smoker", "systolic", "sex", "age"),
        ("1", "0", "NA"),
    ),
    "east": (
        400,
        -2.4,
        ("patient_id", "sex", "age", "ward", "readmitted", "systolic", "smoker"),
        ("true", "false", ""),
    ),
    "west": (
        150,
        -2.3,
        ("smoker", "age", "readmitted", "sex", "systolic", "ward"),
        ("Yes", "No", "n/a"),
    ),
}
TEST = (2000, -2.6, COLUMNS, ("yes", "no", ""))
WARDS = ("medicine", "surgery", "cardiology")
SCHEMA = """\
# The public schema: what every hospital's file contains, and what is predicted. The server and all
# silos use this same file, and its hash is part of what a silo approves. Everything in it is public
# knowledge. Nothing was read from a record.

ignore = ["patient_id"]            # a file may also have these columns; they are not used

[columns.age]
type = "number"
range = [18, 100]                  # adults; values are clipped to it and scaled to [-1, 1]
missing = 60                       # a public value to fill in
indicator = true                   # and a feature that shows where it was filled in

[columns.sex]
type = "category"
categories = ["female", "male", "other"]   # "other" takes all other values

[columns.systolic]
type = "number"                    # mmHg
range = [80, 220]
missing = 130
indicator = true

[columns.smoker]
type = "boolean"
missing = false
indicator = true

[columns.ward]
type = "category"
categories = ["medicine", "surgery", "cardiology"]
missing = "own"                    # a missing value is a category of its own

[label]
column = "readmitted"
task = "binary"
classes = ["no", "yes"]
# Public: one patient in seven is readmitted. The largest weight is 1, or the clip would undo it.
weights = [0.15, 1]
"""


def csv_text(name: str, seed: int = 0) -> str:
    """Return the file of one hospital, or of "test", as a function of the name and the seed."""
    names = [*HOSPITALS, "test"]
    n, base, columns, words = HOSPITALS.get(name, TEST)
    draw = np.random.default_rng((seed, names.index(name)))
    age = draw.normal(62, 17, n).clip(18, 99).round()
    systolic = draw.normal(133, 20, n).round()
    sex = draw.choice(["female", "male"], n)
    ward = draw.choice(WARDS, n, p=[0.5, 0.3, 0.2])
    smoker = draw.random(n) < 0.27
    score = (
        base
        + 1.3 * (age - 62) / 17
        + 0.8 * (systolic - 133) / 20
        + 1.1 * smoker
        + 0.9 * (ward == "cardiology")
    )
    ill = draw.random(n) < 1 / (1 + np.exp(-2 * score))
    yes, no, missing = words
    cells = {
        "patient_id": np.arange(10_000, 10_000 + n).astype(str),
        "age": age.astype(int).astype(str),
        "sex": sex,
        "ward": ward,
        "systolic": systolic.astype(int).astype(str),
        "smoker": np.where(smoker, yes, no),
        "readmitted": np.where(ill, "yes", "no"),
    }
    for column, share in (("age", 0.02), ("systolic", 0.06), ("smoker", 0.2), ("ward", 0.03)):
        cells[column] = np.where(draw.random(n) < share, missing, cells[column])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(cells[column] for column in columns), strict=True))
    return text.getvalue()


def hospitals(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return the four hospitals' tables by name, as pandas reads their files.

    Another seed has other people.
    """
    import pandas as pd  # slow to load, and not needed to write the files

    return {name: pd.read_csv(io.StringIO(csv_text(name, seed))) for name in HOSPITALS}
