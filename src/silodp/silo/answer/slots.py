"""Every record of a silo has a slot: whatever is asked, it is computed at the same place of the
same chunk, and a batch is a mask on the results.

A matrix product rounds a row by its place and by the number of rows beside it. If a batch were
gathered into a tensor of its own, the other records' floats would say how many records were drawn,
and a point w whose layers cancel turns a last bit into the whole clip: replacing or drawing one
record would move them all, and amplification by sampling would be charged that does not hold. So:
 1. Chunks and places follow from n and the silo's own model alone, the shorter last chunk's too: a
    question chooses none of them, but that one of wide rows which do not ask the model has one of
    few shorter chunks (`Exact._width`). All n records are computed for every question, and a batch
    of any kind costs a full pass: at a Poisson rate of 0.05 twenty times what the batch alone
    would.
 2. A record on which the computation raises is zero, and nobody else is (`computed`): no handler
    changes a shape or zeroes another's row.
 3. The number of threads is the same in every answer, and MKL may not take fewer (`pinned`); or
    each chunk is one thread's (`in_threads`).
What remains assumed: in a chunk of a given shape a kernel makes row i from record i, its place and
public numbers, and whether it raises on a record follows from that record. `verify` tests it on
made-up records with the very model, shapes and threads before a gate serves, the tests with several
instruction sets. Memory of every operand begins at a multiple of 64 bytes, or at a place in such a
block that shapes decide, so that no kernel is chosen by where the data happen to lie (the point w
lies where the frame was read, whoever the records are). What can still fail as a whole, such as
memory that the machine does not have, is asked for in sizes that no record influences: it then
fails for this data set and for its neighbour alike.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.keyboard import raise_if_ctrl_c
from silodp.core.statistics import Rows

CHUNK = 2**20
"""Numbers in a chunk of records' gradients: 8 MiB."""


def size_of(width: int) -> int:
    """How many records are in a chunk, if each makes `width` numbers on its way."""
    return max(1, CHUNK // width)


def slots(n: int, width: int) -> list[slice]:
    """The chunks of n records of which each makes `width` numbers on its way."""
    size = size_of(width)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def lengths(n: int, size: int) -> set[int]:
    """Those of the chunks of n records in chunks of this size, the last one's too."""
    return {min(size, n), n % size or min(size, n)}


def computed(
    rows: Rows, x: Tensor, y: Tensor, dim: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """(m, d): row i follows from record i, its place and public numbers, to the last bit; a record
    on which `rows` raises has a zero row.

    Where `rows` raises, it is asked again about half of the records, then about half of these, in
    the same shape and each record at its place: the places of the others hold copies of one of
    those that are asked about. So a record is zero only if a chunk of nothing but itself raises,
    which is its own affair, and everybody else's row comes from the kernels that it always comes
    from. The halves cost time, about 2 log2(m) chunks for each record that raises, and nothing but
    time tells of them.
    """
    try:
        return rows(_own(x), _own(y))
    except BaseException as error:  # a model that ends the program ends nothing
        raise_if_ctrl_c(error)
        kept = torch.zeros(len(x), dim, dtype=dtype)
        _halved(rows, x, y, torch.arange(len(x)), kept)
        return kept


def _halved(rows: Rows, x: Tensor, y: Tensor, asked: Tensor, kept: Tensor) -> None:
    for half in asked.tensor_split(2) if len(asked) > 1 else (asked,):
        at = half[:1].repeat(len(x))
        at[half] = half
        try:
            kept[half] = rows(_own(x[at]), _own(y[at]))[half]
        except BaseException as error:
            raise_if_ctrl_c(error)
            if len(half) > 1:
                _halved(rows, x, y, half, kept)


def _own(values: Tensor) -> Tensor:
    """The same numbers, floats in float64, in memory of their own: aligned and laid out alike in
    whatever chunk they were.

    A copy that kept the strides would give a chunk that is asked again, after a record raised,
    another layout than the first time.
    """
    if values.is_floating_point():
        dtype = torch.float64
    else:
        dtype = values.dtype
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format)


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Torch and MKL take this many threads, neither more nor, as MKL otherwise may, fewer when the
    machine is busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(work: Callable[[int], object], items: Iterable[int], threads: int) -> None:
    """The work for every item, by so many threads, each of which has one thread of torch and MKL:
    what it computes is the same with any number.

    The caller is one of them: if it only waited, a small model's first chunk would be half done
    elsewhere before anything else had begun.
    """
    left = collections.deque(items)

    def drain() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            work(item)

    with pinned(1):  # until all have ended: what is set of MKL holds for all threads
        futures = [
            _pool(threads - 1).submit(_alone, drain) for _ in range(min(threads, len(left)) - 1)
        ]
        try:
            drain()
        finally:
            wait(
                futures
            )  # nothing of one answer is at work while the next is made, also where a chunk raises
    for future in futures:
        future.result()


def _alone(work: Callable[[], None]) -> None:
    """Said before all else, for a thread's first operation in torch would otherwise give it the
    number of threads that the process had then: to ask for the number is such an operation, and
    what is set after it is this thread's own."""
    torch.get_num_threads()
    torch.set_num_threads(1)
    work()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept from answer to answer: to start threads takes as long as a small model's chunk."""
    return ThreadPoolExecutor(threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        after_in_child=_pool.cache_clear
    )  # a child has none of its parent's threads


# --- a gate's test of itself ---------------------------------------------------------------------


def verify(
    rows: Rows, like: tuple[Tensor, Tensor], sizes: set[int], dim: int | None, *, alive: bool = True
) -> None:
    """Raises BadInput unless, in chunks of these sizes, no row depends on what the other places
    hold. The records are made up.

    `like` are features and targets of records, of which shape and type are taken and nothing else.
    With `alive`, rows that are all zero are refused too: a model that raises on every record would
    pass with nothing tried, and answer with noise alone. Without `dim`, rows are not asked again
    where they raise, as by `computed`: whatever raises on a made-up record, beside any others, is
    refused.
    """
    for size in sorted(sizes):
        plain, hostile = (_made_up(like, size, bad) for bad in (False, True))
        alone = _bits(rows, *plain, dim)
        if alive and not bool(alone.view(torch.float64).nan_to_num(0.0).any()):
            raise BadInput(
                "this model gives nothing for a record by itself (it raises, or its "
                "gradient is zero everywhere), so every answer would be noise: "
                "the gate does not serve; use a model that torch.func can differentiate "
                "record by record"
            )
        half = torch.from_numpy(np.random.default_rng(size).permutation(size) % 2 == 0)
        for mine in (half, ~half):  # some places keep what they hold, then the others do
            x, y = (
                torch.where(mine.view(-1, *(1,) * (a.dim() - 1)), a, b)
                for a, b in zip(plain, hostile, strict=True)
            )
            if not torch.equal(_bits(rows, x, y, dim)[mine], alone[mine]):
                raise BadInput(
                    "on this machine what is computed of a record depends on the "
                    f"{size - 1} others that are computed beside it, and no noise is "
                    "paid for that: the gate does not serve; use a model of torch's own "
                    "layers, or another build of torch"
                )


def _made_up(like: tuple[Tensor, Tensor], size: int, hostile: bool) -> tuple[Tensor, Tensor]:
    """Normal features and targets 0, 1, 0, 1 ...; or features among which are NaN, infinities and
    the ends of the floats, and absurd targets.
    """
    rng = np.random.default_rng([size, hostile])
    numbers = rng.normal(size=(size, *like[0].shape[1:]))
    y = torch.arange(size) % 2
    y = y.view(-1, *(1,) * (like[1].dim() - 1)).repeat(
        1, *like[1].shape[1:]
    )  # of a person: one for each of its rows
    if hostile:
        numbers = np.where(
            rng.random(numbers.shape) < 0.5,
            numbers,
            rng.choice([np.nan, np.inf, 3e38, 1e-40, 0.0, -3e38], numbers.shape),
        )
        y = torch.where(y == 0, 2**20, -(2**20))
    return torch.from_numpy(numbers).to(like[0].dtype), y.to(like[1].dtype)


def _bits(rows: Rows, x: Tensor, y: Tensor, dim: int | None) -> Tensor:
    try:
        if dim is None:
            values = rows(_own(x), _own(y))
        else:
            values = computed(rows, x, y, dim)
    except Exception as error:
        raise BadInput(
            "this machine's products of layers fail on a made-up record "
            f"({type(error).__name__}), and would after a charge: the gate does not serve; "
            "use another model, or another build of torch"
        ) from error
    return torch.where(values.isnan(), math.nan, values).view(
        torch.int64
    )  # all NaNs alike, and unlike any number
