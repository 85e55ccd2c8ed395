"""How much memory a simulation takes at its peak: the engine's temporaries are counted on a few made-up records, the rest is arithmetic."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from silodp.core.errors import BadInput
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.engine.clipping import choose, task
from silodp.engine.task import Task
from silodp.server.algorithms import find

SAMPLE = 2**26
"""Bytes of temporaries, as the engine reckons them, of the made-up records: enough to outweigh the model's own parameters."""
HEAP = 2.0
"""What the heap holds for a byte of temporaries, since blocks of several sizes leave gaps: 1.2 to 2.8 with glibc, as its layout falls out."""
VECTORS = 3
"""Vectors of a silo alive when noise is added: the mean, the draws and the release."""


def program_bytes() -> int:
    """The most that this process has taken so far: before any work Python and the libraries, which a simulation loads too."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent process had taken
        return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def simulation_bytes(problem: Problem, features: Sequence[int], counts: Sequence[int], *, difference: bool) -> int:
    """The peak of one run over silos of `counts` records beyond the program itself: records, and the temporaries of one query on them all."""
    silos, longest = len(counts), max(counts)
    w = problem.initial([0])
    reference = w if difference else None
    x, y = torch.zeros(1, 1, *features), torch.zeros(1, 1, dtype=torch.int64)

    def asked(silos: int, records: int) -> Task:
        there = x.expand(silos, records, *features), y.expand(silos, records), torch.ones(1, 1).expand(silos, records)
        return task(problem, w, *(t.contiguous() if silos == 1 else t for t in there), 1.0, reference=reference)

    engine = choose(whole := asked(silos, longest))
    needs = engine.needs(whole)
    half = max(1, SAMPLE // needs.record // 2)
    one, two = (_peak(engine.sum, asked(1, n)) for n in (half, 2 * half))
    record = (two - one) / half
    vector = silos * problem.dim * w.element_size()
    kept = silos * longest * (x[0, 0].numel() * x.element_size() + y.element_size() + 1 + w.element_size())
    return round(kept + max(HEAP * record * needs.at_once + needs.fixed + 2 * vector, VECTORS * vector))


def stated(model: str, features: int | None, classes: int, counts: Sequence[int], algorithm: str) -> int:
    """The whole peak, program included, of a simulation of this ready model."""
    if features is None or features < 1:
        raise BadInput(f"features is {features}; --model needs --features, the number of columns of a record, 1 or more")
    rest = program_bytes()  # before the sample below, whose temporaries are no part of the program
    problem = Problem(*model_by_name(model, features, classes))
    return rest + simulation_bytes(problem, (features,), counts, difference="refine" in find(algorithm).kinds)


def _peak(call: Callable[[Task], object], sample: Task) -> int:
    with _Live() as live:
        call(sample)
    return live.most


class _Live(TorchDispatchMode):
    """Adds up the bytes of tensors that are made and not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for storage in given:
            self._seen.add(storage)  # what the caller has is counted elsewhere
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return made

    def _freed(self, size: int) -> None:
        self.now -= size
