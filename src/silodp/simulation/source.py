"""The source of a simulation's records: the silos' own files or a built-in set, how they are read,
and which part is held out.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.host.schema import load_schema
from silodp.server.order import is_of
from silodp.silo.data.datasets import DATASETS
from silodp.silo.data.files import load_silos
from silodp.silo.data.records import Records
from silodp.silo.data.tables import load_by_schema, read_table

PATHS = ("schema", "test")


@dataclass(frozen=True)
class Loaded:
    """All records, and their public properties. `test` are raw test records of a built-in set."""

    records: Records
    classes: int
    features: tuple[str, ...]
    test: tuple[Tensor, Tensor] | None
    scale: str = "private"
    """The scaling that is left to do: "private" (to be learned within the budget), "public" (done
    already, by ranges that the user gave) or "none".
    """
    ranges: Tensor | None = None
    """The public ranges (features, 2)."""


@dataclass(frozen=True)
class Source:
    """The places of records, in words and paths."""

    data: str | None = None
    silos: tuple[Path, ...] = ()
    label: str = "label"
    classes: str | None = None
    schema: Path | None = None
    test: Path | None = None
    scale: str = "private"
    held_out: float = 0.0

    @cached_property
    def read_by(self) -> Schema | None:
        """Return the public schema of the silos' files, or None without one."""
        if self.schema:
            return load_schema(self.schema)
        return None

    def load(self, seed: int = 0, *, holes: bool = False, raw: bool = False) -> Loaded:
        """Return all records, with public ranges applied.

        `seed` decides how a built-in set is split. `raw` asks for its pixels, for a map of
        features. `holes` allows missing values in files without a schema.
        """
        if self.read_by:
            loaded = self._by_schema(self.read_by)
        else:
            loaded = self._without_schema(seed, holes, raw)
        if self.data or self.read_by:
            scale = "none"
        else:
            scale = self.scale
        if scale in ("private", "none"):
            return Loaded(*loaded, scale)
        records, classes, features, test = loaded
        ranges = _ranges(Path(scale), features)
        return Loaded(with_ranges(records, ranges), classes, features, test, "public", ranges)

    def standardised(self, *, raw: bool) -> bool:
        """Return whether the records are scaled by their own statistics, which no budget is charged
        for. This is true of built-in sets, except for raw pixels.
        """
        return bool(self.data) and not (raw and DATASETS[self.data].pixels)

    def class_names(self, classes: int) -> list[str]:
        """Return the classes of files without a schema, or of a built-in set. A number has none."""
        if self.classes and classes:
            return self.classes.split(",")
        return [str(k) for k in range(classes)]

    def words(self) -> dict[str, Any]:
        """Return the source as plain JSON for run.json, with absolute paths."""
        files = {name: path.resolve() for name in PATHS if (path := getattr(self, name))}
        if self.scale in ("private", "none"):
            scale = self.scale
        else:
            scale = Path(self.scale).resolve()
        words = (
            asdict(self)
            | {"silos": [path.resolve() for path in self.silos], "scale": scale}
            | files
        )
        return json.loads(json.dumps(words, default=str))

    @classmethod
    def read(cls, description: Mapping[str, Any], folder: Path) -> Source:
        """Return the source in the content of the run.json of this folder. Raise BadInput if it is
        not readable.
        """
        words = description.get("source")
        if not isinstance(words, Mapping) or words.keys() != {field.name for field in fields(cls)}:
            raise BadInput(
                f"{folder} contains no run of `silodp train` that this version can read; it may be "
                "of an older version: train again"
            )
        typed = {"silos": tuple[str, ...], "held_out": float, "label": str, "scale": str}
        # JSON has a list where a source has a tuple.
        plain = dict(words)
        if isinstance(words["silos"], list):
            plain["silos"] = tuple(words["silos"])
        else:
            plain["silos"] = None
        if wrong := sorted(
            name for name, value in plain.items() if not is_of(typed.get(name, str | None), value)
        ):
            raise BadInput(
                f"the source in {folder} is not as silodp wrote it ({', '.join(wrong)}); "
                "restore its run.json"
            )
        paths = {name: Path(words[name]) if words[name] else None for name in PATHS}
        given: dict[str, Any] = {**words, **paths, "silos": tuple(map(Path, words["silos"]))}
        return cls(**given)

    def _without_schema(
        self, seed: int, holes: bool, raw: bool
    ) -> tuple[Records, int, tuple[str, ...], tuple[Tensor, Tensor] | None]:
        """Return records, number of classes, features and test records of a built-in set or of
        plain files.

        Raise BadInput if the options do not name exactly one of them.
        """
        if self.test:
            raise BadInput("--test needs --schema, which defines its columns; give one")
        if bool(self.data) == bool(self.silos):
            raise BadInput("give either --data NAME or one --silo FILE for each silo")
        if self.data:
            if self.data not in DATASETS:
                raise BadInput(
                    f"data set {self.data!r} is unknown; choose one of {', '.join(DATASETS)}"
                )
            split = DATASETS[self.data].of(seed, None, raw=raw)
            return split.train, split.classes, (), (split.test_x, split.test_y)
        if self.classes is None:
            declared = None
        elif self.classes == "number":
            declared = ()
        else:
            declared = tuple(self.classes.split(","))
        loaded = load_silos(self.silos, self.label, classes=declared, holes=holes)
        # Without a list of classes a label is 0 or 1.
        classes = 2 if declared is None else len(declared)
        return Records.of(loaded.records_raw, loaded.names), classes, loaded.features, None

    def _by_schema(
        self, schema: Schema
    ) -> tuple[Records, int, tuple[str, ...], tuple[Tensor, Tensor] | None]:
        """Return records, number of classes, features and test records of files with a schema.

        Raise BadInput if other options repeat what the schema has.
        """
        if self.data or not self.silos:
            raise BadInput(
                "--schema is for silos' own files; give one --silo FILE for each silo, and "
                "no --data"
            )
        if (
            self.classes is not None
            or self.label != "label"
            or self.scale not in ("private", "none")
        ):
            raise BadInput(
                "--schema has the label, its classes and the ranges already; leave out "
                "--label, --classes and --scale"
            )
        loaded = load_by_schema(self.silos, schema)
        test = None
        if self.test:
            table = read_table(self.test, schema.by_row)
            test = (torch.from_numpy(table.x), torch.from_numpy(table.y))
        records = Records.of(loaded.records_raw, loaded.names, loaded.missing)
        return records, len(loaded.classes), loaded.features, test


def _ranges(path: Path, features: Sequence[str]) -> Tensor:
    """Return the public ranges (features, 2) of a TOML or JSON table of feature = [low, high].

    Raise BadInput if the file cannot be read, or if a range is missing or wrong.
    """
    try:
        text = path.read_text()
        if path.suffix == ".json":
            table = json.loads(text)
        else:
            table = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"the ranges file {path} cannot be read ({error}); --scale takes private, "
            "none, or a TOML or JSON table of feature = [low, high]"
        ) from None
    if not isinstance(table, dict):
        raise BadInput(
            f"{path} contains a {type(table).__name__}, not a table; give feature = [low, "
            "high] for every feature"
        )
    missing = [f for f in features if f not in table]
    if missing:
        raise BadInput(
            f"{path} has no range for {', '.join(missing[:5])}; give feature = [low, high] "
            "for every feature"
        )
    pairs = [table[f] for f in features]
    for feature, pair in zip(features, pairs, strict=True):
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(v, int | float) for v in pair)
            and pair[0] < pair[1]
        ):
            raise BadInput(
                f"the range of {feature} in {path} is {pair!r}; it must be [low, high] "
                "with low < high"
            )
    return torch.tensor(pairs, dtype=torch.float64)


def with_ranges(records: Records, ranges: Tensor) -> Records:
    """Return the records with each feature's public range mapped to [-1, 1], and clipped there."""
    low = ranges[:, 0]
    high = ranges[:, 1]
    x = (2 * (records.x.double() - low) / (high - low) - 1).clamp(-1, 1).float()
    return Records(
        x * records.mask.unsqueeze(-1), records.y, records.counts, records.names, records.missing
    )
