"""Sum clipped gradients in C (`c/native.c`), and draw NumPy's normals there.

A tile of records passes through a chain of Linear layers and ReLU, or through convolutions with
ReLU and max-pooling and such a chain, while it is in the cache. In a sequence model a record does.

The C code is built when silodp is installed (`setup.py`), once for each level of processor. If it
was not built, this engine supports nothing, and torch does the work. One thread makes the sum of a
run and silo, in one order. So it is the same to the last bit for any number of threads and other
runs, whatever those and the padding contain. SILODP_NATIVE=0 leaves everything to torch. The name
of a level, such as x86-64-v3, selects that one. Simulations use this engine. A gate does not.
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
"""The levels that `setup.py` builds, the fastest first, and the least `level()` of a processor.

They need AVX-512, AVX2, and nothing that a processor of the platform lacks.
"""


class _Call(ctypes.Structure):
    """The arguments of `clipped_sums` in C."""

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
        if built:
            return _loaded(built[0])
        return None
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
    """Return the library of a level, or None if it cannot be loaded.

    It uses the OpenMP that torch has loaded, so that both have one pool of threads.
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
    """Fill out, float32 and contiguous, with the generator's next normals.

    `c/normals.c` is a few times as fast as NumPy. The numbers are the same for any number of
    threads.
    """
    native = library()
    has_pcg64 = (
        type(generator) is np.random.Generator and type(generator.bit_generator) is np.random.PCG64
    )
    if (
        native is not None
        and has_pcg64
        and out.dtype == np.float32
        and out.flags.carray
        and _are_numpys(native)
    ):
        _normals(native, generator, out)
    else:
        generator.standard_normal(out=out, dtype=np.float32)


def _normals(native: ctypes.CDLL, generator: np.random.Generator, out: np.ndarray) -> None:
    """Fill out with the generator's next normals in C."""
    with generator.bit_generator.lock:  # so that no two threads draw the same numbers
        native.normals(
            generator.bit_generator.ctypes.state_address,
            out.ctypes.data,
            out.size,
            torch.get_num_threads(),
        )


@functools.cache
def _are_numpys(native: ctypes.CDLL) -> bool:
    """Return whether the normals of `c/normals.c` are those of this NumPy.

    C reads and writes NumPy's state. Each process tries it once, in 2 ms.
    """
    one, other = (np.random.default_rng(1) for _ in range(2))
    for count in (1, 2**17):  # the second call begins with the bits that the first leaves
        drawn = np.empty(count, np.float32)
        _normals(native, one, drawn)
        if not np.array_equal(drawn, other.standard_normal(count, np.float32)):
            return False
    return one.bit_generator.state == other.bit_generator.state


class Native:
    """Sum in C, by `c/native.c`."""

    def supports(self, task: Task) -> bool:
        """Return whether C has the model, in float32 on a CPU and within the memory."""
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
        """Return the clipped sums (J, S, d).

        Raise MemoryError if C gets no memory, and IndexError for a token that is out of range.
        """
        native = library()
        model = compiled(task)
        problem = task.problem
        runs, silos, records = task.shape
        assert native is not None
        assert model is not None
        points = task.points
        weight = task.weight
        if model.ops:
            least = 16
        else:
            least = 1024
        # A silo's records are divided, so that few silos keep all threads busy.
        pieces = max(1, min(16 // max(1, silos), records // least))
        out = points[0].new_empty(runs, silos, problem.dim)
        x = task.x.to(torch.float32).contiguous()
        y = task.y.to(torch.float32).contiguous()
        clips = task.clips.to(torch.float64).contiguous()
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
            if weight.dim() == 3:
                weights = weight[part]
            else:
                weights = weight
            # C gets only addresses: these names keep the memory while it runs.
            weights = weights.to(torch.float32).contiguous()
            here = [point[part].to(torch.float32).contiguous() for point in points]
            call = _Call(
                layers=len(model.chain),
                loss=LOSSES.index(problem.loss),
                runs=len(into),
                silos=silos,
                records=records,
                dim=problem.dim,
                targets=model.targets,
                pieces=pieces,
                points=len(points),
                own=points[0].dim() == 3,
                weighted=weight.dim() == 3,
                layer=model.chain,
                stages=len(model.stages),
                stage=model.stages,
                ops=len(model.ops),
                op=model.ops,
                x=x.data_ptr(),
                y=y.data_ptr(),
                weight=weights.data_ptr(),
                point=here[0].data_ptr(),
                clip=clips[part].data_ptr(),
                out=into.data_ptr(),
            )
            if len(here) > 1:
                call.reference = here[1].data_ptr()
            failure = native.clipped_sums(ctypes.byref(call), torch.get_num_threads())
            if failure == 1:
                raise MemoryError(f"no memory for {blocks(task, model)} bytes")
            if failure:
                raise IndexError("a token is out of range")
            if pieces > 1:
                out[part] = into.sum(2)
        return out


def blocks(task: Task, model: Compiled) -> int:
    """Return the bytes that all threads take together."""
    native = library()
    assert native is not None
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
    return native.block_bytes(ctypes.byref(call)) * torch.get_num_threads()
