"""The engine in C (`native.c`): a tile of records goes through a chain of Linear layers and ReLU, or convolutions with ReLU and max-pooling
and such a chain, while it lies in the cache. And NumPy's normals.

The C compiler builds it on first use, into the user's cache; without one, or where anything else is missing, it supports nothing.
A run's and silo's sum is made by one thread in one order, so it is the same to the last bit for any number of threads and of other runs,
whatever those and the padding hold. SILODP_NATIVE=0 leaves all to torch; an architecture that gcc knows, as x86-64, builds it for that one.
Simulations use it. A gate does not: what it loads is what was installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from silodp.core.problem.losses import Loss, cross_entropy, logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import conv_known, pair, side_by_side
from silodp.engine.model import Node, chain, read, sequence
from silodp.engine.structured import numbers
from silodp.engine.task import Needs, Task

SOURCE = Path(__file__).with_suffix(".c")
INCLUDED = SOURCE.with_name("stages.c"), SOURCE.with_name("normals.c")
FLAGS = (
    *("-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC"),
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
LOSSES: list[Loss] = [cross_entropy, logistic, squared_error]
MOST = 16
"""Linear layers, as `native.c` has it."""


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("inputs", "outputs", "weight", "bias", "relu")]


class _Stage(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_long) for name in ("channels", "height", "width", "outputs")),
        *((name, ctypes.c_long * 2) for name in ("kernel", "padding", "pool")),
        *((name, ctypes.c_long) for name in ("relu", "weight", "bias")),
    ]


class _Call(ctypes.Structure):
    _numbers = ("layers", "loss", "runs", "silos", "records", "dim", "targets", "pieces", "points", "own", "weighted")
    _arrays = ("x", "y", "weight", "point", "reference", "clip", "out")
    _fields_ = [
        *((name, ctypes.c_long) for name in _numbers),
        ("layer", ctypes.POINTER(_Layer)),
        ("stages", ctypes.c_long),
        ("stage", ctypes.POINTER(_Stage)),
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
        loaded.clipped_sums.argtypes, loaded.clipped_sums.restype = [ctypes.POINTER(_Call), ctypes.c_long], ctypes.c_long
        loaded.normals.argtypes, loaded.normals.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long], None
        loaded.block_bytes.argtypes, loaded.block_bytes.restype = [ctypes.POINTER(_Call)], ctypes.c_long
    except (AttributeError, OSError, RuntimeError, subprocess.CalledProcessError):  # RuntimeError: there is no home
        return None
    return loaded


def _built(compiler: str, architecture: str = "native") -> ctypes.CDLL:
    """The library for this source and architecture, from the cache if it is there and whole; OpenMP's functions are those that torch has
    loaded, so that both have one pool of threads.
    """
    processor = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0]
    kind = b"\n".join(line for line in processor.split(b"\n") if line.split(b"\t")[0] in (b"model name", b"flags", b"Features"))
    text = b"".join(path.read_bytes() for path in (SOURCE, *INCLUDED))
    flags = (*FLAGS, f"-march={architecture}")
    name = hashlib.sha256(text + kind + " ".join((compiler, *flags)).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "silodp"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = cache / f"native-{name}.so"
    with (cache / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers that start together build it once
        for path in (cache, *([found] if os.path.lexists(found) else [])):
            if (about := path.lstat()).st_uid != os.getuid() or about.st_mode & 0o022 or path.is_symlink():
                raise PermissionError(f"others may write {path}")
        if found.exists():
            with contextlib.suppress(OSError):  # cut off, as by a power cut
                return ctypes.CDLL(str(found))
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
            subprocess.run([compiler, *flags, "-c", SOURCE, "-o", compiled], check=True, capture_output=True)
            subprocess.run([compiler, "-shared", compiled, "-o", linked, "-lm"], check=True, capture_output=True)
            linked.chmod(0o700)
            linked.rename(found)
    return ctypes.CDLL(str(found))


def standard_normals(generator: np.random.Generator, out: np.ndarray) -> None:
    """Fills out, float32 and contiguous, with the generator's next normals: by `normals.c` a few times as fast as by NumPy, and the same."""
    made, known = library(), type(generator) is np.random.Generator and type(generator.bit_generator) is np.random.PCG64
    if made is not None and known and out.dtype == np.float32 and out.flags.carray and _are_numpys(made):
        _normals(made, generator, out)
    else:
        generator.standard_normal(out=out, dtype=np.float32)


def _normals(made: ctypes.CDLL, generator: np.random.Generator, out: np.ndarray) -> None:
    with generator.bit_generator.lock:  # NumPy's own: no two threads may have the same numbers
        made.normals(generator.bit_generator.ctypes.state_address, out.ctypes.data, out.size)


@functools.cache
def _are_numpys(made: ctypes.CDLL) -> bool:
    """Whether the normals of `normals.c` are those of this NumPy, whose state it reads and writes; each process tries it once, in 2 ms."""
    one, other = (np.random.default_rng(1) for _ in range(2))
    for count in (1, 2**17):  # the second call begins with what the first leaves over
        found = np.empty(count, np.float32)
        _normals(made, one, found)
        if not np.array_equal(found, other.standard_normal(count, np.float32)):
            return False
    return one.bit_generator.state == other.bit_generator.state


class Native:
    name = "C"

    def supports(self, task: Task) -> bool:
        point, model = task.points[0], compiled(task)
        if library() is None or model is None or not point.is_cpu or point.dtype != torch.float32 or point.shape[-1] != task.problem.dim:
            return False
        return not model.stages or _blocks(task, model) <= task.memory

    def needs(self, task: Task) -> Needs:
        _, silos, records = task.shape
        model = compiled(task)
        assert model is not None
        return Needs(4 * task.x.shape[2:].numel() + 4 * model.targets, silos * records, _blocks(task, model))

    def sum(self, task: Task) -> Tensor:
        made, model, problem, (runs, silos, records) = library(), compiled(task), task.problem, task.shape
        assert made is not None
        assert model is not None
        points, weight = task.points, task.weight
        pieces = max(1, min(16 // max(1, silos), records // 1024))  # of a silo's records, so that few silos keep all threads busy
        out = points[0].new_empty(runs, silos, problem.dim)
        x, y, clips = (
            t.to(dtype).contiguous() for t, dtype in ((task.x, torch.float32), (task.y, torch.float32), (task.clips, torch.float64))
        )
        step = runs if pieces == 1 else max(1, task.memory // max(1, 4 * silos * pieces * problem.dim))
        for j in range(0, runs, max(1, step)):
            part = slice(j, j + step)
            into = out[part] if pieces == 1 else out.new_empty(*out[part].shape[:2], pieces, problem.dim)
            own = [weight[part] if weight.dim() == 3 else weight, *(point[part] for point in points)]
            held = [t.to(torch.float32).contiguous() for t in own]
            call = _Call(
                *(len(model.chain), LOSSES.index(problem.loss), len(into), silos, records, problem.dim, model.targets),
                *(pieces, len(points), points[0].dim() == 3, weight.dim() == 3, model.chain, len(model.stages), model.stages),
                *(t.data_ptr() for t in (x, y, *held)),
                *([None] * (2 - len(points)) + [clips[part].data_ptr(), into.data_ptr()]),
            )
            if made.clipped_sums(ctypes.byref(call), torch.get_num_threads()) != 0:
                raise MemoryError(f"no memory for {_blocks(task, model)} bytes")
            if pieces > 1:
                out[part] = into.sum(2)
        return out


def _blocks(task: Task, model: Compiled) -> int:
    """Bytes that all threads take together."""
    made = library()
    assert made is not None
    call = _Call(
        layers=len(model.chain), dim=task.problem.dim, targets=model.targets, points=len(task.points), layer=model.chain,
        stages=len(model.stages), stage=model.stages,
    )  # fmt: skip
    return made.block_bytes(ctypes.byref(call)) * torch.get_num_threads()


# --- the model as native.c has it ----------------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    stages: ctypes.Array[_Stage]
    chain: ctypes.Array[_Layer]
    targets: int
    """Numbers of a record's label."""


_COMPILED: WeakKeyDictionary[Problem, dict[Any, Compiled | None]] = WeakKeyDictionary()


def compiled(task: Task) -> Compiled | None:
    """Stages and layers; None if a module, the loss or a shape is not for C."""
    problem, x, y = task.problem, task.x, task.y
    if read(problem) is None:
        return None
    models, key = _COMPILED.setdefault(problem, {}), (x.shape[2:], x.dtype, y.shape[2:], y.dtype)
    if key not in models:
        modules = chain(problem, x) or (sequence(read(problem)) if numbers(problem, x) is not None else [])
        models[key] = _model(problem, modules, x, y)
    return models[key]


def _model(problem: Problem, modules: list[Node], x: Tensor, y: Tensor) -> Compiled | None:
    places, at = {}, 0
    for name, size in zip(problem.shapes, problem.sizes, strict=True):
        places[name], at = at, at + size
    if any(full not in places for node in modules for full in node.names.values()):  # frozen
        return None
    shape, rest = tuple(x.shape[2:]), modules
    if rest and type(first := rest[0].module) is nn.Unflatten:
        shape, rest = tuple(first.unflattened_size), rest[1:]
        if min(shape) < 1 or tuple(x.shape[2:]) != (math.prod(shape),):  # torch would make out a size of -1
            return None
    stages: list[_Stage] = []
    while rest and type(rest[0].module) is nn.Conv2d:
        if (found := _stage(problem, places, shape, rest)) is None:
            return None
        stage, shape, rest = found
        stages.append(stage)
    if rest and type(rest[0].module) is nn.Flatten:
        rest = rest[1:]
    elif stages:
        return None
    layers: list[_Layer] = []
    for node in rest:
        module = node.module
        if type(module) is nn.Linear:
            if (found := _weight_and_bias(problem, places, node, (module.out_features, module.in_features))) is None:
                return None
            layers.append(_Layer(module.in_features, module.out_features, *found, False))
        elif type(module) is nn.ReLU and layers:
            layers[-1].relu = True
        else:
            return None
    if not 0 < len(layers) <= MOST or len(stages) > MOST or problem.loss not in LOSSES:
        return None
    widths = [math.prod(shape), *(layer.outputs for layer in layers)]
    labels = y.dim() == 2 and y.dtype != torch.float64  # in float32 a number beside a label could become it
    fits: dict[Loss, bool] = {
        cross_entropy: labels,
        logistic: y.dim() == 2 and widths[-1] == 1,
        squared_error: y.shape[2:].numel() == widths[-1],
    }
    if not fits[problem.loss] or [layer.inputs for layer in layers] != widths[:-1]:
        return None
    targets = widths[-1] if problem.loss is squared_error else 1
    return Compiled((_Stage * len(stages))(*stages), (_Layer * len(layers))(*layers), targets)


def _weight_and_bias(problem: Problem, places: dict[str, int], node: Node, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Where they lie in a point, -1 for a bias that is not there; None if a parameter was replaced, or added."""
    shapes = {name: tuple(problem.shapes[full]) for name, full in node.names.items()}
    if shapes not in ({"weight": shape}, {"weight": shape, "bias": shape[:1]}):
        return None
    return places[node.names["weight"]], places[node.names["bias"]] if "bias" in node.names else -1


def _stage(
    problem: Problem, places: dict[str, int], shape: tuple[int, ...], modules: list[Node]
) -> tuple[_Stage, tuple[int, ...], list[Node]] | None:
    """The stage that begins with the convolution at the head of `modules`, what shape it gives, and what follows it; None if it is not for C."""
    (node, *rest), pool, relu = modules, [1, 1], False
    layer = node.module
    while rest and type(rest[0].module) in (nn.ReLU, nn.MaxPool2d):
        after, rest = rest[0].module, rest[1:]
        if type(after) is nn.MaxPool2d:
            if pool != [1, 1] or not side_by_side(after):
                return None
            pool = pair(after.kernel_size)
        relu |= type(after) is nn.ReLU
    assert isinstance(layer, nn.Conv2d)
    whole = (layer.out_channels, layer.in_channels, *layer.kernel_size)
    found = _weight_and_bias(problem, places, node, whole)
    plain = (layer.stride, layer.dilation, layer.groups, layer.padding != "same") == ((1, 1), (1, 1), 1, True) and conv_known(layer, 4)
    if len(shape) != 3 or not plain or found is None or shape[0] != whole[1]:
        return None
    padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
    sizes = [shape[1 + i] + 2 * padding[i] - layer.kernel_size[i] + 1 for i in (0, 1)]
    if min(sizes[i] // pool[i] for i in (0, 1)) < 1:
        return None
    stage = _Stage(*shape, whole[0], *((ctypes.c_long * 2)(*two) for two in (layer.kernel_size, padding, pool)), relu, *found)
    return stage, (whole[0], *(sizes[i] // pool[i] for i in (0, 1))), rest
