"""Read a hospital's own file, as its policy names it: the only way from a file to records.

Modules that answer import neither this module nor the readers that it uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from silodp.core.errors import BadInput
from silodp.core.problem.person import present
from silodp.core.problem.schema import Schema
from silodp.host.schema import load_schema
from silodp.silo.data.faults import Faults
from silodp.silo.data.files import load_silos
from silodp.silo.data.records import Records
from silodp.silo.data.tables import KnownBy, raw, read_table

if TYPE_CHECKING:
    from silodp.core.features.feature_map import FeatureMap
    from silodp.silo.service.policy import DaemonSettings


@dataclass(frozen=True, eq=False, repr=False)
class SiloData:
    """A silo's records as its gate uses them.

    `known_by` has the features, labels and exact digest that a ledger recognises them by.
    """

    x: np.ndarray  # (n, features), or (n, P, features) for persons
    y: np.ndarray
    features: tuple[str, ...]
    known_by: KnownBy
    missing: np.ndarray | None = None  # as x: where the schema had a value filled in
    void: np.ndarray | None = None  # (n,) bool: records that count as zero

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return features and targets of the used rows, each row by itself, for sentences to the
        operator.
        """
        if self.y.ndim == 1:
            return self.x, self.y
        used = present(torch.from_numpy(self.y)).numpy()
        return self.x[used], self.y[used]

    def records(self, mapped: FeatureMap | None = None) -> Records:
        """Return the records as the model sees them.

        A map's features, of each row, are computed here, once, and stay in this process.
        """
        if mapped:
            x = torch.from_numpy(self.x).float()
            y = torch.from_numpy(self.y)
            return Records.of([(mapped.of(x.flatten(0, y.dim() - 1)).unflatten(0, y.shape), y)])
        records = Records.of([(self.x, self.y)])
        if self.missing is not None:
            records = replace(records, missing=torch.from_numpy(self.missing)[None])
        if self.void is not None:
            records = replace(records, void=torch.from_numpy(self.void)[None])
        return records


def find_schema(place: DaemonSettings) -> Schema | None:
    """Return the schema that the policy names, or None. Raise BadInput if its label differs."""
    if not place.schema:
        return None
    schema = load_schema(place.schema)
    if (place.label, place.classes) != (schema.label.name, schema.label.classes):
        raise BadInput(
            f"the policy's label and classes are not those of the schema {place.schema}; "
            "`silodp silo init` writes them"
        )
    return schema


def read_records(
    place: DaemonSettings, schema: Schema | None, faults: Faults | None = None
) -> SiloData:
    """Return the records of the silo's file. Raise BadInput without any of its content but column
    names.

    With `faults`, as at a gate, no record decides whether the file is read.
    """
    try:
        if schema:
            table = read_table(Path(place.data), schema, faults)
            return SiloData(table.x, table.y, schema.features, table.raw, table.missing, table.void)
        loaded = load_silos([Path(place.data)], place.label, classes=place.classes, faults=faults)
    except BadInput as error:
        raise BadInput(str(error).rstrip(".")) from None
    except Exception:
        raise BadInput(
            f"the data file {place.data} cannot be read; it must be a complete CSV, Parquet "
            "or NPZ file"
        ) from None
    x, y = loaded.records_raw[0]
    x = x.reshape(len(x), -1)
    void = None
    if faults is not None:
        # Without a schema there is no public value to fill in.
        void = faults.bad(tuple(faults.cells), len(y))
    return SiloData(x, y, loaded.features, raw(loaded.cells[0]), void=void)
