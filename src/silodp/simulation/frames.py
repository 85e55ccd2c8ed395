"""Training on tables in memory, for notebooks: `silodp.train`. It has the same order and the same
code as `silodp train`, without files.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from silodp.core import quality
from silodp.core.errors import BadInput
from silodp.core.extension import is_file
from silodp.core.local_figures import ALL
from silodp.core.problem.schema import Schema
from silodp.host.model import Stored, open_model
from silodp.host.plain_files import json_in
from silodp.host.schema import load_schema
from silodp.runs import RunFolder
from silodp.server.advice.chooser import Advice
from silodp.server.advice.words import lines
from silodp.server.evaluation import Wanted
from silodp.server.order import Order
from silodp.silo.data.files import listed
from silodp.silo.data.records import Records
from silodp.silo.data.tables import rows_of, table_of
from silodp.silo.predict import said
from silodp.simulation.scoring import evaluate_run, spent_of
from silodp.simulation.source import Loaded, Source, with_ranges
from silodp.simulation.training import train as train_source

Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Held(Source):
    """A source whose records are in memory already."""

    loaded: Loaded = field(kw_only=True, repr=False)
    by: Schema | None = None
    names: tuple[str, ...] = ()
    """The names of the classes."""

    @property
    def read_by(self) -> Schema | None:  # type: ignore[override]
        """Return the schema of the frames, or None without one."""
        return self.by

    def load(self, seed: int = 0, *, holes: bool = False, raw: bool = False) -> Loaded:
        """Return the records. The arguments change nothing."""
        return self.loaded

    def words(self) -> dict[str, Any]:
        """Return the names of the frames, and the share that is held out, for run.json."""
        return {"frames": list(self.loaded.records.names), "held_out": self.held_out}

    def class_names(self, classes: int) -> list[str]:
        """Return the names of the classes."""
        return list(self.names)


@dataclass(frozen=True)
class Trained:
    """A trained model, the spend of each silo, and the run's folder if `out` was given."""

    model: Stored = field(repr=False)
    summary: dict[str, Any]
    folder: Path | None
    chosen: tuple[str, ...]
    """The advisor's choices, and the result to expect, in plain sentences. Empty if the algorithm
    was named.
    """
    source: Held = field(repr=False)

    def predict(self, frame: pd.DataFrame, threshold: float | None = None) -> pd.DataFrame:
        """Return the risks and the predicted class for each row of a frame, with the frame's index.
        A label in the frame is not used.
        """
        rows = rows_of("the frame", cells_of(frame), self.model.schema)
        return said(self.model, rows, threshold, {}).set_index(frame.index)

    def evaluate(
        self,
        epsilon: float = 1.0,
        *,
        bins: int | None = None,
        cap: float | None = None,
        threshold: float | None = None,
        seed: int | None = None,
    ) -> pd.DataFrame:
        """Return the model's quality on the held-out records: a row for each figure, from a private
        release of each silo.

        This is `silodp evaluate`. Each silo pays `epsilon`, beside everything before, and `spent`
        has the sum. `low` and `high` are 95 % intervals, for noise and sampling together. A figure
        that the noise hides has no value, and `too_noisy` is true.
        """
        answer = evaluate_run(
            self._place,
            epsilon=str(epsilon),
            wanted=Wanted(bins, cap, threshold),
            seed=seed,
            source=self.source,
        )
        row = answer["scores"][0]
        rows = {}
        for name, figure in row["figures"].items():
            shown = quality.clear_figure(row, name)
            if shown:
                low, high = quality.interval(name, shown)
            else:
                low = figure["low"]
                high = figure["high"]
            rows[name] = {
                "value": shown and shown["value"],
                "low": low,
                "high": high,
                "too_noisy": shown is None,
            }
        return pd.DataFrame.from_dict(rows, orient="index").astype(
            {"value": float, "low": float, "high": float}
        )

    @property
    def too_large(self) -> bool:
        """Return whether the model and its records are too many for personal models."""
        return bool(json_in(RunFolder(self._place).comparison).get("too_large"))

    @property
    def compared(self) -> pd.DataFrame:
        """Alone, together and personal for each silo and for all of them, on the records that
        `held_out` kept from training.

        Computed on raw records, without noise: for the analyst's own data only, not private. No
        epsilon is charged for them.
        """
        found = json_in(RunFolder(self._place).comparison)
        if not found.get("all"):
            raise BadInput(
                "there is no comparison of alone, together and personal: train with held_out=0.2, "
                "20 records or more in a silo, and no large network"
            )
        tables = {silo["name"]: silo["figures"] for silo in found["silos"]}
        tables[ALL] = found["all"]
        rows = {(name, model): own for name, one in tables.items() for model, own in one.items()}
        frame = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
        frame.index = pd.MultiIndex.from_tuples(rows, names=["silo", "model"])
        return frame

    @property
    def spent(self) -> pd.DataFrame:
        """Return the epsilon of each silo at its delta: for training, and for training and
        evaluations together.
        """
        silos = spent_of(self._place)["silos"]
        rows = [
            {
                "training": s["spent_epsilon"],
                "in_all": s.get("in_all", {}).get("epsilon", s["spent_epsilon"]),
                "delta": s["delta"],
            }
            for s in silos
        ]
        return pd.DataFrame(rows, index=pd.Index([s["name"] for s in silos], name="silo"))

    @property
    def _place(self) -> Path:
        """Return the run's folder, which may be temporary."""
        return self.model.path.parent


def train(
    frames: Sequence[pd.DataFrame] | Mapping[str, pd.DataFrame],
    *,
    label: str = "label",
    classes: Sequence[Any] | None = (0, 1),
    schema: str | Path | Mapping[str, Any] | Schema | None = None,
    ranges: Ranges | None = None,
    out: str | Path | None = None,
    held_out: float = 0.0,
    **settings: Any,
) -> Trained:
    """Run one private training over a frame for each silo.

    `settings` are those of `silodp train`: epsilon, delta, model, algorithm, rounds, step, ...

    Without a schema every column but the label is a number. `classes` is the public list of the
    label's values, or None for a number. Features are scaled by public `ranges`, or else within the
    budget. With `out` the run's folder is kept, and `silodp report` reads it.

    Raise BadInput for frames or settings that cannot be used.
    """
    named = by_silo(frames)
    if not named or not all(isinstance(frame, pd.DataFrame) for frame in named.values()):
        raise BadInput(
            "train takes a list of pandas frames, one for each silo, or a mapping from "
            "silos' names to them"
        )
    if schema is not None:
        source = by_schema(named, schema_of(schema), held_out)
    else:
        columns = columns_of(named, label)
        parts = [
            (_numbers(name, frame.loc[:, columns]), np.asarray(frame[label]))
            for name, frame in named.items()
        ]
        source = plainly(
            parts,
            list(named),
            list(map(str, columns)),
            classes,
            ranges,
            label=label,
            held_out=held_out,
        )
    return run(source, settings, out)


def run(source: Held, settings: Mapping[str, Any], out: str | Path | None = None) -> Trained:
    """Train by an Order of these settings, in `out` or in a temporary folder. The temporary folder
    is deleted with the result.
    """
    order = order_of(settings)
    advices = list[Advice]()
    code = {
        name: text
        for name in ("model", "feature_map")
        if (text := getattr(order, name)) and is_file(text)
    }
    if out is not None:
        folder = Path(out)
    else:
        folder = Path(tempfile.mkdtemp(prefix="silodp-")) / "run"
    try:
        summary = train_source(order, source, folder, on_advice=advices.append)
        chosen = tuple(line for advice in advices for line in lines(advice))
        model = open_model(folder, code)
    except BaseException:
        if out is None:
            shutil.rmtree(folder.parent, ignore_errors=True)
        raise
    if out is not None:
        return Trained(model, summary, folder, chosen, source)
    trained = Trained(model, summary, None, chosen, source)
    weakref.finalize(trained, shutil.rmtree, folder.parent, ignore_errors=True)
    return trained


def order_of(settings: Mapping[str, Any]) -> Order:
    """Return the Order of these keywords.

    epsilon and delta may be a number, or a number for each silo's name. `settings` is a mapping.
    Raise BadInput for an unknown keyword.
    """
    words = {name: value for name, value in settings.items() if value is not None}
    for name in ("epsilon", "delta", "settings"):
        if name in words:
            given = words[name]
            if isinstance(given, Mapping):
                words[name] = tuple(f"{key}={value}" for key, value in given.items())
            else:
                words[name] = (str(given),)
    try:
        return Order(**words)
    except TypeError:
        unknown = sorted(words.keys() - set(Order.__dataclass_fields__))
        raise BadInput(
            f"the setting {(unknown or ['?'])[0]!r} is unknown; the settings are "
            f"{', '.join(Order.__dataclass_fields__)}"
        ) from None


# --- tables to records ---------------------------------------------------------------------------


def by_silo(frames: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the frames by the names of their silos. A list gets the names silo-0, silo-1, ..."""
    if isinstance(frames, Mapping):
        return dict(frames)
    return {f"silo-{i}": frame for i, frame in enumerate(frames)}


def schema_of(given: str | Path | Mapping[str, Any] | Schema) -> Schema:
    """Return the schema of a path, a table or a Schema."""
    if isinstance(given, Schema):
        return given
    if isinstance(given, Mapping):
        return Schema.of(given)
    return load_schema(given)


def by_schema(frames: Mapping[str, pd.DataFrame], schema: Schema, held_out: float = 0.0) -> Held:
    """Return the records of frames that are read by a schema."""
    tables = [
        table_of(f"the frame of {name}", cells_of(frame), schema) for name, frame in frames.items()
    ]
    pairs = [(table.x, table.y) for table in tables]
    records = Records.of(pairs, list(frames), [table.missing for table in tables])
    loaded = Loaded(records, len(schema.label.classes), schema.features, None, "none")
    return Held(held_out=held_out, loaded=loaded, by=schema)


def plainly(
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    silos: Sequence[str],
    features: Sequence[str],
    classes: Sequence[Any] | None,
    ranges: Ranges | None,
    **about: Any,
) -> Held:
    """Return the records of numbers (n, features) and labels (n,) of each silo.

    `about` are further fields of the Source. Raise BadInput for a label that is not in the public
    list, or for missing or wrong ranges.
    """
    pairs = [(x, _targets(silo, y, classes)) for silo, (x, y) in zip(silos, parts, strict=True)]
    records = Records.of(pairs, silos)
    k = len(classes or ())
    fields: dict[str, Any] = {"names": tuple(map(str, classes or ())), **about}
    if ranges is None:
        return Held(**fields, loaded=Loaded(records, k, tuple(features), None, "private"))
    if lacking := [name for name in features if name not in ranges]:
        raise BadInput(
            f"ranges has no {lacking[0]!r}; give (low, high) for every feature, or leave ranges out"
        )
    bounds = torch.tensor([ranges[name] for name in features], dtype=torch.float64)
    if not bool((bounds[:, 0] < bounds[:, 1]).all()):
        raise BadInput("ranges must be (low, high) with low < high for every feature")
    return Held(
        **fields,
        loaded=Loaded(with_ranges(records, bounds), k, tuple(features), None, "public", bounds),
    )


def columns_of(frames: Mapping[str, pd.DataFrame], label: str) -> list[Any]:
    """Return the feature columns of the first frame. Raise BadInput if a frame lacks the label, or
    has other columns.
    """
    columns = [name for name in next(iter(frames.values())).columns if name != label]
    for silo, frame in frames.items():
        if label not in frame.columns:
            raise BadInput(
                f"the frame of {silo} has no column {label!r}; name the label's column with label="
            )
        if set(frame.columns) != {*columns, label}:
            raise BadInput(
                f"the frame of {silo} has other columns than the first one; all must have the same"
            )
    return columns


def cells_of(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the columns as arrays of numbers or of objects, in the form that files give."""
    return {str(name): _plain(column) for name, column in frame.items()}


def _plain(column: pd.Series) -> np.ndarray:
    """Return the column as an array of numbers or of objects."""
    values = column.to_numpy()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values
    return column.astype(object).to_numpy()


def _numbers(name: str, frame: pd.DataFrame) -> np.ndarray:
    """Return the frame as finite numbers. Raise BadInput if it has others."""
    refuse_text(f"the frame of {name}", frame)
    x = frame.to_numpy(np.float64)
    if not np.isfinite(x).all():
        raise BadInput(
            f"the frame of {name} has missing or infinite values; give a schema, which "
            "defines what a missing value becomes"
        )
    return x


def refuse_text(whose: str, frame: pd.DataFrame) -> None:
    """Raise BadInput, with `whose` first, if columns have texts or dates in place of numbers."""
    words = []
    for name, column in frame.items():
        try:
            column.to_numpy(np.float64)
        except (TypeError, ValueError):
            words.append(str(name))
    if words:
        raise BadInput(
            f"{whose} has columns that are not numbers: {listed(words)}; give schema= (a path or a "
            "table, as `silodp init` writes), which defines their categories, or leave them out"
        )


def _targets(silo: str, y: np.ndarray, classes: Sequence[Any] | None) -> np.ndarray:
    """Return the labels as numbers or as indices of classes. Raise BadInput for a label that is no
    class.
    """
    if classes is None:
        return np.asarray(y, np.float32)
    index = {value: k for k, value in enumerate(classes)}
    codes = np.array([index.get(value, -1) for value in np.asarray(y).tolist()], np.int64)
    if (codes < 0).any():
        raise BadInput(
            f"silo {silo}, row {int((codes < 0).argmax()) + 1}: the label is not one of "
            "the classes; give them all with classes="
        )
    return codes
