"""List what silos have answered outside a training, for the report and the evidence archive: each
question with its noise, and the silos in the answer. All of it is public.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from silodp.core.query import Query
from silodp.core.weights import Weights
from silodp.server.federation import Measured


class ReleaseList:
    """Note the answers of a federation (`federation.Record`)."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.found: list[dict[str, Any]] = []
        """A row for each answer, in plain JSON."""

    def answered(self, query: Query, silos: Sequence[int], weights: Weights) -> None:
        """Note the question, the noise of each silo and who is in the answer."""
        mechanism = query.mechanism
        row = {
            "statistic": type(query.statistic).__name__,
            "fields": fields_of(query),
            "kind": mechanism.kind,
            "numbers": int(query.statistic.shape[-1]),
            "clip": float(torch.as_tensor(mechanism.clip).max()),
            "noise_multiplier": {self._names[i]: mechanism.of(i).event().multiplier for i in silos},
        }
        if mechanism.total:
            row["counted"] = mechanism.counted
        self.found.append(row)

    def measured(self, found: Measured) -> None:
        """The size of an error follows from the question."""

    def absent(self) -> None:
        """A question without an answer releases nothing."""

    def roster(self, silos: Sequence[int]) -> None:
        """Each silo that is asked by itself has a row of its own."""


def fields_of(query: Query) -> dict[str, Any]:
    """Return the public fields of a question's statistic, as plain JSON."""
    fields = {}
    for name in query.statistic.wire:
        value = getattr(query.statistic, name)
        fields[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    return fields
