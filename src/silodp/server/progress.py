"""progress.jsonl of a run's folder: a line for each question as soon as it is answered, for whoever
looks on.

A line has what is public, or follows from releases alone: who answered and who did not, how long
each answer is, how long its noise is expected to be, what share of each silo's budget is used up
and, by its rule, how much epsilon. Whoever writes holds a lock on the file, so that a reader can
tell a run that goes on from one that was killed. Before a question goes out, a line with "asking"
says what silos will have spent if it is charged: gates charge before they answer, and a server may
be killed in between. Nothing reads a line back to train with: a torn or missing file loses a
picture, not a run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.mechanisms.totals import as_total
from silodp.core.query import Query
from silodp.host.portable import OWN, lock
from silodp.runs import RunFolder


def measured(
    query: Query, values: Tensor, silos: Sequence[int], counts: Sequence[int], names: Sequence[str]
) -> dict[str, Any]:
    """What a look at the releases `values` (M, d) of these silos tells: each one's norm and its
    noise's, and those of their mean.
    """
    norms = values.double().norm(dim=-1).tolist()
    return measured_norms(
        query, norms, float(values.double().mean(0).norm()) if norms else None, silos, counts, names
    )


def measured_norms(
    query: Query,
    norms: Sequence[float],
    norm: float | None,
    silos: Sequence[int],
    counts: Sequence[int],
    names: Sequence[str],
    shares: Sequence[float] = (),
) -> dict[str, Any]:
    """The same of releases and a mean whose norms are known; `shares` are what each silo counts in
    the mean, alike where nothing is said.

    The noise's norm is std x sqrt(d) with the std of the mechanism. For local steps it is what the
    steps' noises add up to if gradient and prox operator did not bend them: step x std x sqrt(steps
    x d).
    """
    statistic = query.statistic
    mechanism = query.mechanism
    dimension = int(statistic.shape[-1])
    clip = float(torch.as_tensor(mechanism.clip).max())
    grown = math.sqrt(dimension) * statistic.gain
    own = [mechanism.of(i).event().multiplier for i in silos]
    noises = [
        m * 2 * clip / mechanism.sampling.batch(counts[i]) * grown
        for m, i in zip(own, silos, strict=True)
    ]
    shares = shares or [1 / len(norms) for _ in norms]
    return {
        "kind": mechanism.kind,
        "statistic": type(statistic).__name__,
        "clip": clip,
        "dimension": dimension,
        "answered": {
            names[i]: {"norm": a, "noise": b, "noise_multiplier": m}
            for i, a, b, m in zip(silos, norms, noises, own, strict=True)
        },
        "norm": norm,
        "noise": math.hypot(*(share * noise for share, noise in zip(shares, noises, strict=True)))
        if norms
        else None,
    }


def measured_total(
    query: Query, total: Tensor, records: int, names: Sequence[str]
) -> dict[str, Any]:
    """The same of a shuffler's total (1, d) over these silos: what their mean tells, and of no silo
    anything but that it is in it.
    """
    mechanism = as_total(query.mechanism)
    dimension = int(total.shape[-1])
    noise = float(mechanism.noise_in(len(names), records).max())
    return {
        "kind": mechanism.kind,
        "statistic": type(query.statistic).__name__,
        "clip": float(mechanism.clips.max()),
        "dimension": dimension,
        "answered": {name: {} for name in names},
        "norm": float(mechanism.mean_in(total, records).norm()),
        "noise": noise * math.sqrt(dimension),
    }


class Progress:
    """The file, held by the one process that writes it. With `keep` it goes on after the lines of
    the process before.

    Else the first line takes the place of those lines, so that whoever gives up before it has lost
    nothing.
    """

    def __init__(self, folder: Path, *, keep: bool, patience: float = 10.0) -> None:
        self._file = os.fdopen(
            os.open(RunFolder(folder).progress, os.O_RDWR | os.O_CREAT | OWN, 0o644),
            "r+b",
            buffering=0,
        )
        deadline = time.monotonic() + patience
        while not lock(self._file):  # a reader holds it for an instant
            if time.monotonic() > deadline:
                self._file.close()
                raise BadInput(
                    f"another process writes to {folder}; wait for its end, or choose "
                    "another folder"
                )
            time.sleep(0.01)
        whole = self._file.read() if keep else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        self._anew = not keep
        if keep:
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        self._known = {
            found["question"]
            for found in map(json.loads, whole.splitlines())
            if "question" in found
        }

    def write(self, question: int, line: Mapping[str, Any], *, replayed: bool = False) -> None:
        """A question that is replayed from a journal is written only if it is missing."""
        if replayed and question in self._known:
            return
        self._known.add(question)
        if self._anew:
            self._file.truncate(0)
            self._anew = False
        self._append({"question": question}, line)

    def ahead(self, question: int, line: Mapping[str, Any]) -> None:
        """Of a question that has no answer yet; afterwards it is on the disk."""
        self._append({"asking": question}, line)
        os.fsync(self._file.fileno())

    def _append(self, which: Mapping[str, int], line: Mapping[str, Any]) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._file.write(json.dumps({**which, "time": at, **line}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()
