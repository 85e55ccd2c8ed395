"""The engine in C (`native.c`): a tile of records goes through a chain of Linear layers and ReLU,
or convolutions with ReLU and max-pooling and such a chain, or a record through a sequence model,
while it lies in the cache. And NumPy's normals.

The C compiler builds it on first use, into the user's cache; without one, or where anything else is
missing, it supports nothing. A run's and silo's sum is made by one thread in one order, so it is
the same to the last bit for any number of threads and of other runs, whatever those and the padding
hold. SILODP_NATIVE=0 leaves all to torch; an architecture that gcc knows, as x86-64, builds it for
that one. Simulations use it. A gate does not: what it loads is what was installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silodp.engine.compiled import LOSSES, Compiled, Layer, Op, Stage, compiled
from silodp.engine.task import Task

SOURCE = Path(__file__).with_suffix(".c")
INCLUDED = [SOURCE.with_name(f"{name}.c") for name in ("vectors", "normals", "stages", "sequences")]
FLAGS = (
    *("-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)


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


def compiler() -> str | None:
    """Where the C compiler is that builds `native.c`, for Linux alone; None without one."""
    return shutil.which("gcc") if sys.platform == "linux" else None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled `native.c`, or None where it cannot be had or SILODP_NATIVE is 0."""
    asked = os.environ.get("SILODP_NATIVE", "")
    if asked == "0" or not (found := compiler()):
        return None
    try:
        loaded = _built(found, "native" if asked in ("", "1") else asked)
        loaded.clipped_sums.argtypes, loaded.clipped_sums.restype = (
            [ctypes.POINTER(_Call), ctypes.c_long],
            ctypes.c_long,
        )
        loaded.normals.argtypes, loaded.normals.restype = (
            [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long],
            None,
        )
        loaded.block_bytes.argtypes, loaded.block_bytes.restype = (
            [ctypes.POINTER(_Call)],
            ctypes.c_long,
        )
    except (
        AttributeError,
        OSError,
        RuntimeError,
        subprocess.CalledProcessError,
    ):  # RuntimeError: there is no home
        return None
    return loaded


def _built(compiler: str, architecture: str = "native") -> ctypes.CDLL:
    """The library for this source and architecture, from the cache if it is there and whole;
    OpenMP's functions are those that torch has loaded, so that both have one pool of threads.
    """
    import fcntl  # on Linux alone, as is all of this

    processor = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0]
    kind = b"\n".join(
        line
        for line in processor.split(b"\n")
        if line.split(b"\t")[0] in (b"model name", b"flags", b"Features")
    )
    text = b"".join(path.read_bytes() for path in (SOURCE, *INCLUDED))
    flags = (*FLAGS, f"-march={architecture}")
    name = hashlib.sha256(text + kind + " ".join((compiler, *flags)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "silodp"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = cache / f"native-{name}.so"
    with (cache / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers that start together build it once
        for path in (cache, *([found] if os.path.lexists(found) else [])):
            if (
                (about := path.lstat()).st_uid != os.getuid()
                or about.st_mode & 0o022
                or path.is_symlink()
            ):
                raise PermissionError(f"others may write {path}")
        if found.exists():
            with contextlib.suppress(OSError):  # cut off, as by a power cut
                return ctypes.CDLL(str(found))
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
            subprocess.run(
                [compiler, *flags, "-c", SOURCE, "-o", compiled], check=True, capture_output=True
            )
            subprocess.run(
                [compiler, "-shared", compiled, "-o", linked, "-lm"],
                check=True,
                capture_output=True,
            )
            linked.chmod(0o700)
            linked.rename(found)
    return ctypes.CDLL(str(found))


def standard_normals(generator: np.random.Generator, out: np.ndarray) -> None:
    """Fills out, float32 and contiguous, with the generator's next normals: by `normals.c` a few
    times as fast as by NumPy, and the same for any number of threads.
    """
    made, known = (
        library(),
        type(generator) is np.random.Generator and type(generator.bit_generator) is np.random.PCG64,
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
    """Whether the normals of `normals.c` are those of this NumPy, whose state it reads and writes;
    each process tries it once, in 2 ms.
    """
    one, other = (np.random.default_rng(1) for _ in range(2))
    for count in (1, 2**17):  # the second call begins with what the first leaves over
        found = np.empty(count, np.float32)
        _normals(made, one, found)
        if not np.array_equal(found, other.standard_normal(count, np.float32)):
            return False
    return one.bit_generator.state == other.bit_generator.state


class Native:
    """Sums in C, by `native.c`."""

    def supports(self, task: Task) -> bool:
        point, model = task.points[0], compiled(task)
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
        points, weight = task.points, task.weight
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
        step = (
            runs if pieces == 1 else max(1, task.memory // max(1, 4 * silos * pieces * problem.dim))
        )
        for j in range(0, runs, max(1, step)):
            part = slice(j, j + step)
            into = (
                out[part]
                if pieces == 1
                else out.new_empty(*out[part].shape[:2], pieces, problem.dim)
            )
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
