"""Sum clipped gradients in C (`c/native.c`), and draw NumPy's normals there.

A tile of records goes through a chain of Linear layers and ReLU, or convolutions with ReLU and
max-pooling and such a chain, or a record through a sequence model, while it lies in the cache.

The C code is built when silodp is installed (`setup.py`), once for each level of processor. Where
it was not built, this engine supports nothing, and torch does the work. A run's and silo's sum is
made by one thread in one order. So it is the same to the last bit for any number of threads and of
other runs, whatever those and the padding hold. SILODP_NATIVE=0 leaves all to torch; the name of a
level, as x86-64-v3, asks for that one. Simulations use this engine. A gate does not.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.engine.compiled import LOSSES, Compiled, Layer, Op, Stage, compiled
from silodp.engine.task import Task

FOLDER = Path(__file__).with_name("c")
BASELINE = "baseline"
LEVELS = {"x86-64-v4": 4, "x86-64-v3": 3, BASELINE: 0}
"""What `setup.py` builds, the fastest first, with the least `level()` of a processor that runs it:
AVX-512, AVX2, and what every processor of the platform runs.
"""


class _Call(ctypes.Structure):
    _numbers = (
        "layers",
        "loss",
        "runs",
        "silos",
        "records",
        "dim",
        "targets",
        "pieces",
        "points",
        "own",
        "weighted",
    )
    _arrays = ("x", "y", "weight", "point", "reference", "clip", "out")
    _fields_ = [
        *((name, ctypes.c_long) for name in _numbers),
        ("layer", ctypes.POINTER(Layer)),
        ("stages", ctypes.c_long),
        ("stage", ctypes.POINTER(Stage)),
        ("ops", ctypes.c_long),
        ("op", ctypes.POINTER(Op)),
        *((name, ctypes.c_void_p) for name in _arrays),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the C code, or None where it was not built or SILODP_NATIVE is 0.

    Raise BadInput if SILODP_NATIVE names a level that is not there or that this processor lacks.
    """
    wanted = os.environ.get("SILODP_NATIVE", "")
    if wanted == "0":
        return None
    built = runnable_levels()
    if wanted in ("", "1"):
        return _loaded(built[0]) if built else None
    if wanted not in built:
        choices = ", ".join(["0", "1", *built])
        raise BadInput(
            f"SILODP_NATIVE is {wanted!r}, which this installation or processor does not have; "
            f"set it to one of {choices}, or unset it"
        )
    return _loaded(wanted)


def runnable_levels() -> list[str]:
    """Return the levels that were built and that this processor runs, the fastest first."""
    baseline = _loaded(BASELINE)
    if baseline is None:
        return []
    reached = baseline.level()
    return [
        level for level, least in LEVELS.items() if reached >= least and _loaded(level) is not None
    ]


@functools.cache
def _loaded(level: str) -> ctypes.CDLL | None:
    """Return the library of a level; OpenMP's functions are those that torch has loaded, so that
    both have one pool of threads.
    """
    for path in sorted(FOLDER.glob(f"{level}.*so")):
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError:  # it was built for another platform, or with another OpenMP
            continue
        loaded.level.restype = ctypes.c_long
        loaded.clipped_sums.argtypes = [ctypes.POINTER(_Call), ctypes.c_long]
        loaded.clipped_sums.restype = ctypes.c_long
        loaded.normals.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
        loaded.normals.restype = None
        loaded.block_bytes.argtypes = [ctypes.POINTER(_Call)]
        loaded.block_bytes.restype = ctypes.c_long
        return loaded
    return None


def standard_normals(generator: np.random.Generator, out: np.ndarray) -> None:
    """Fills out, float32 and contiguous, with the generator's next normals: by `c/normals.c` a few
    times as fast as by NumPy, and the same for any number of threads.
    """
    made = library()
    known = (
        type(generator) is np.random.Generator and type(generator.bit_generator) is np.random.PCG64
    )
    if (
        made is not None
        and known
        and out.dtype == np.float32
        and out.flags.carray
        and _are_numpys(made)
    ):
        _normals(made, generator, out)
    else:
        generator.standard_normal(out=out, dtype=np.float32)


def _normals(made: ctypes.CDLL, generator: np.random.Generator, out: np.ndarray) -> None:
    with generator.bit_generator.lock:  # NumPy's own: no two threads may have the same numbers
        made.normals(
            generator.bit_generator.ctypes.state_address,
            out.ctypes.data,
            out.size,
            torch.get_num_threads(),
        )


@functools.cache
def _are_numpys(made: ctypes.CDLL) -> bool:
    """Whether the normals of `c/normals.c` are those of this NumPy, whose state it reads and
    writes; each process tries it once, in 2 ms.
    """
    one, other = (np.random.default_rng(1) for _ in range(2))
    for count in (1, 2**17):  # the second call begins with what the first leaves over
        found = np.empty(count, np.float32)
        _normals(made, one, found)
        if not np.array_equal(found, other.standard_normal(count, np.float32)):
            return False
    return one.bit_generator.state == other.bit_generator.state


class Native:
    """Sum in C, by `c/native.c`."""

    def supports(self, task: Task) -> bool:
        point = task.points[0]
        model = compiled(task)
        if (
            task.limits is not None
            or library() is None
            or model is None
            or not point.is_cpu
            or point.dtype != torch.float32
            or point.shape[-1] != task.problem.dim
        ):
            return False
        return not (model.stages or model.ops) or blocks(task, model) <= task.memory

    def sum(self, task: Task) -> Tensor:
        made, model, problem, (runs, silos, records) = (
            library(),
            compiled(task),
            task.problem,
            task.shape,
        )
        assert made is not None
        assert model is not None
        points = task.points
        weight = task.weight
        least = 16 if model.ops else 1024
        pieces = max(
            1, min(16 // max(1, silos), records // least)
        )  # of a silo's records, so that few silos keep all threads busy
        out = points[0].new_empty(runs, silos, problem.dim)
        x, y, clips = (
            t.to(dtype).contiguous()
            for t, dtype in (
                (task.x, torch.float32),
                (task.y, torch.float32),
                (task.clips, torch.float64),
            )
        )
        if pieces == 1:
            step = runs
        else:
            step = max(1, task.memory // max(1, 4 * silos * pieces * problem.dim))
        for j in range(0, runs, max(1, step)):
            part = slice(j, j + step)
            if pieces == 1:
                into = out[part]
            else:
                into = out.new_empty(*out[part].shape[:2], pieces, problem.dim)
            own = [
                weight[part] if weight.dim() == 3 else weight,
                *(point[part] for point in points),
            ]
            held = [t.to(torch.float32).contiguous() for t in own]
            call = _Call(
                *(
                    len(model.chain),
                    LOSSES.index(problem.loss),
                    len(into),
                    silos,
                    records,
                    problem.dim,
                    model.targets,
                ),
                *(
                    pieces,
                    len(points),
                    points[0].dim() == 3,
                    weight.dim() == 3,
                    model.chain,
                    len(model.stages),
                    model.stages,
                ),
                *(len(model.ops), model.ops),
                *(t.data_ptr() for t in (x, y, *held)),
                *([None] * (2 - len(points)) + [clips[part].data_ptr(), into.data_ptr()]),
            )
            if failed := made.clipped_sums(ctypes.byref(call), torch.get_num_threads()):
                raise (
                    MemoryError(f"no memory for {blocks(task, model)} bytes")
                    if failed == 1
                    else IndexError("a token is out of range")
                )
            if pieces > 1:
                out[part] = into.sum(2)
        return out


def blocks(task: Task, model: Compiled) -> int:
    """Bytes that all threads take together."""
    made = library()
    assert made is not None
    call = _Call(
        layers=len(model.chain),
        dim=task.problem.dim,
        targets=model.targets,
        points=len(task.points),
        layer=model.chain,
        stages=len(model.stages),
        stage=model.stages,
        ops=len(model.ops),
        op=model.ops,
    )
    return made.block_bytes(ctypes.byref(call)) * torch.get_num_threads()
