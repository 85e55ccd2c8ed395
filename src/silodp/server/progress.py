"""The file progress.jsonl of a run's folder: one line for each question, written as soon as it is
answered.

A line has only what is public, or what follows from releases. It has the silos that answered and
those that did not, the norm of each answer, the expected norm of its noise, the used share of each
silo's budget, and the epsilon spent by the silo's rule.

The writing process locks the file. So a reader can distinguish a run in progress from a run that
was killed. Before a question goes out, a line with "asking" has what silos will have spent if they
charge the question. Gates charge before they answer, and a server may be killed in between.

Training reads no line back. If the file is torn or missing, a picture is lost, not a run.
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
    """Return the line of a question from the releases `values` (M, d) of these silos.

    The line has the norm of each release and of its noise, and the norms of their mean.
    """
    norms = values.double().norm(dim=-1).tolist()
    if norms:
        norm_of_mean = float(values.double().mean(0).norm())
    else:
        norm_of_mean = None
    return measured_norms(query, norms, norm_of_mean, silos, counts, names)


def measured_norms(
    query: Query,
    norms: Sequence[float],
    norm: float | None,
    silos: Sequence[int],
    counts: Sequence[int],
    names: Sequence[str],
    shares: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the line of a question from the norms of its releases and the norm of their mean.

    `shares` are the weights of the silos in the mean, by default equal. The expected norm of the
    noise is std x sqrt(d), with the std of the mechanism. For local steps it is the norm of the sum
    of the steps' noises: step x std x sqrt(steps x d). This ignores how gradients and prox operator
    change that sum.
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
    if norms:
        noise = math.hypot(*(share * own for share, own in zip(shares, noises, strict=True)))
    else:
        noise = None
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
        "noise": noise,
    }


def measured_total(
    query: Query, total: Tensor, records: int, names: Sequence[str]
) -> dict[str, Any]:
    """Return the line of a question from a shuffler's total (1, d) over these silos.

    The line has the norm of their mean. About a single silo it only shows that the total includes
    the silo.
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
    """The open file, locked by the one process that writes it.

    With `keep` new lines follow the lines of an earlier process. Otherwise the first line replaces
    them, so a process that ends before its first line loses nothing.
    """

    def __init__(self, folder: Path, *, keep: bool, patience: float = 10.0) -> None:
        self._file = os.fdopen(
            os.open(RunFolder(folder).progress, os.O_RDWR | os.O_CREAT | OWN, 0o644),
            "r+b",
            buffering=0,
        )
        deadline = time.monotonic() + patience
        # A reader locks the file for an instant, to see whether the run goes on.
        while not lock(self._file):
            if time.monotonic() > deadline:
                self._file.close()
                raise BadInput(
                    f"another process writes to {folder}; wait for its end, or choose "
                    "another folder"
                )
            time.sleep(0.01)
        self._replaces = not keep
        self._written: set[int] = set()
        """Numbers of the questions that have a line."""
        if keep:
            content = self._file.read()
            # A killed process may have left an incomplete last line.
            content = content[: content.rfind(b"\n") + 1]
            self._file.truncate(len(content))
            self._file.seek(len(content))
            lines = map(json.loads, content.splitlines())
            self._written = {line["question"] for line in lines if "question" in line}

    def write(self, question: int, line: Mapping[str, Any], *, replayed: bool = False) -> None:
        """Write the line of an answered question. Skip a question that is replayed from a journal
        and has a line.
        """
        if replayed and question in self._written:
            return
        self._written.add(question)
        if self._replaces:
            self._file.truncate(0)
            self._replaces = False
        self._append({"question": question}, line)

    def ahead(self, question: int, line: Mapping[str, Any]) -> None:
        """Write the line of a question that has no answer yet, and wait until it is on the disk."""
        self._append({"asking": question}, line)
        os.fsync(self._file.fileno())

    def _append(self, which: Mapping[str, int], line: Mapping[str, Any]) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._file.write(json.dumps({**which, "time": at, **line}).encode() + b"\n")

    def close(self) -> None:
        """Close the file, which ends its lock."""
        self._file.close()
