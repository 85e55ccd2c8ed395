"""The moments that a run has bought: kept in its folder, since they are private already and anybody
may make more of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.query import Query
from silodp.core.statistics.gram import Gram
from silodp.host import atomic
from silodp.runs import RunFolder
from silodp.server.federation import Measured


@dataclass(frozen=True)
class Bought:
    """What was asked, the mean products (1, d) that came back, the noise's standard deviation and
    the number of records, each (1, 1).
    """

    gram: Gram
    mean: Tensor
    noise: Tensor
    records: Tensor


class Keeping:
    """A federation that remembers the last moments it has measured."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._bought = list[tuple[Query, Measured]]()

    def measure(self, query: Query) -> Measured:
        found = self._inner.measure(query)
        self._bought = [(query, found)]
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, folder: Path) -> None:
        for query, found in self._bought:
            if isinstance(gram := query.statistic, Gram):
                about = {
                    "features": gram.features,
                    "classes": gram.classes,
                    "cap": gram.cap,
                    "bound": float(gram.bound),
                }
                tensors = {
                    name: part.double().cpu().contiguous() for name, part in found._asdict().items()
                }
                atomic.write(
                    RunFolder(folder).moments,
                    save(tensors, metadata={"gram": json.dumps(about)}),
                    mode=0o644,
                )


def bought(folder: Path) -> Bought:
    """Return the moments in a run's folder; BadInput where there are none."""
    try:
        with safe_open(RunFolder(folder).moments, "pt") as file:
            gram = Gram(**json.loads(file.metadata()["gram"]))
            parts = {
                name: file.get_tensor(name).to(torch.float64)
                for name in ("mean", "noise", "records")
            }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"{folder} has no moments ({type(error).__name__}); give the folder of a "
            "finished run of --algorithm one-shot"
        ) from None
    return Bought(gram, **parts)
