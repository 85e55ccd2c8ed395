"""Give every record of a silo a slot: the same place of the same chunk in every query.

A batch is a mask on the results. A matrix product rounds a row by its place and by the number of
rows in the same product. If a batch were gathered into a tensor of its own, the other records'
floats would reveal how many records were drawn. A point w whose layers cancel turns a last bit into
the whole clip. So replacing or drawing one record would move all of them, and amplification by
sampling would be charged without being true. Therefore:

 1. Chunks and places follow from n and the silo's own model alone, also those of the shorter last
    chunk. A query chooses none of them, except that a query of wide rows which do not evaluate the
    model has one of few shorter chunks (`Exact._width`). All n records are computed for every
    query. A batch of any kind costs a full pass: at a Poisson rate of 0.05 twenty times the batch
    alone.
 2. A record on which the computation raises is zero, and no other record is (`computed`). No
    handler changes a shape or zeroes another record's row.
 3. The number of threads is the same in every answer, and MKL may not use fewer (`pinned`); or each
    chunk is computed by one thread (`in_threads`).

What remains assumed: in a chunk of a given shape a kernel makes row i from record i, its place and
public numbers, and whether it raises on a record follows from that record. `verify` tests this on
invented records with the same model, shapes and threads before a gate serves. The tests do so with
several instruction sets.

Memory of every operand begins at a multiple of 64 bytes, or at a place in such a block that shapes
decide. So no kernel is chosen by the address of the data. (The point w is where the frame was read,
whichever the records are.)

A failure of the whole computation, such as a lack of memory, can depend on sizes only, and no
record influences these. It then happens for this data set and for its neighbour alike.
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

from silodp.core.errors import BadInput, raise_if_ctrl_c
from silodp.core.statistics import Rows

CHUNK = 2**20
"""Numbers in a chunk of records' gradients: 8 MiB."""


def size_of(width: int) -> int:
    """Return how many records are in a chunk, if each makes `width` numbers on its way."""
    return max(1, CHUNK // width)


def slots(n: int, width: int) -> list[slice]:
    """Return the chunks of n records of which each makes `width` numbers on its way."""
    size = size_of(width)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def lengths(n: int, size: int) -> set[int]:
    """Return the lengths of the chunks of n records in chunks of this size, the last one's too."""
    return {min(size, n), n % size or min(size, n)}


def computed(
    rows: Rows, x: Tensor, y: Tensor, dim: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return rows (m, d), where row i follows from record i, its place and public numbers, to the
    last bit.

    A record on which `rows` raises has a zero row. If `rows` raises, it is called again for half of
    the records, then for half of these. Shape and places stay the same: the places of the others
    have copies of one of the records in question. So a record is zero only if a chunk of copies of
    it raises, which depends on that record alone. Every other row comes from the kernels that it
    always comes from. The halves cost time, about 2 log2(m) chunks for each record that raises.
    Only the time reveals them.
    """
    try:
        return rows(_own(x), _own(y))
    except BaseException as error:
        # A model that calls sys.exit must not end the gate either.
        raise_if_ctrl_c(error)
        kept = torch.zeros(len(x), dim, dtype=dtype)
        _halved(rows, x, y, torch.arange(len(x)), kept)
        return kept


def _halved(rows: Rows, x: Tensor, y: Tensor, records: Tensor, kept: Tensor) -> None:
    """Compute rows for each half of these records, and put them in `kept`."""
    halves = (records,)
    if len(records) > 1:
        halves = records.tensor_split(2)
    for half in halves:
        at = half[:1].repeat(len(x))
        at[half] = half
        try:
            kept[half] = rows(_own(x[at]), _own(y[at]))[half]
        except BaseException as error:
            raise_if_ctrl_c(error)
            if len(half) > 1:
                _halved(rows, x, y, half, kept)


def _own(values: Tensor) -> Tensor:
    """Return the same numbers, floats in float64, in new memory that is aligned and contiguous.

    A copy that kept the strides would give a chunk that is computed again, after a record raised,
    another layout than the first time.
    """
    if values.is_floating_point():
        dtype = torch.float64
    else:
        dtype = values.dtype
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format)


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Make torch and MKL use this many threads while the body runs.

    Without this, MKL may use fewer when the machine is busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(work: Callable[[int], object], items: Iterable[int], threads: int) -> None:
    """Do the work for every item in this many threads, each with one thread of torch and MKL.

    The results are the same with any number of threads. The caller is one of the threads. If it
    only waited, a small model's first chunk would be half done elsewhere before anything else had
    begun.
    """
    left = collections.deque(items)

    def drain() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            work(item)

    # MKL's setting is the same for all threads, so it stays until all have ended.
    with pinned(1):
        helpers = min(threads, len(left)) - 1
        futures = [_pool(threads - 1).submit(_alone, drain) for _ in range(helpers)]
        try:
            drain()
        finally:
            # No work of one answer may go on while the next is made, also if a chunk raises.
            wait(futures)
    for future in futures:
        future.result()


def _alone(work: Callable[[], None]) -> None:
    """Do the work in a thread that has one thread of torch.

    Otherwise a thread's first operation in torch would give it the number of threads that the
    process had then. Reading the number is such an operation, and a number that is set after it
    applies to this thread only.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)
    work()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads that is reused by every answer.

    To start threads takes as long as a small model's chunk.
    """
    return ThreadPoolExecutor(threads)


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)


# --- a gate's test of itself ---------------------------------------------------------------------


def verify(
    rows: Rows, like: tuple[Tensor, Tensor], sizes: set[int], dim: int | None, *, alive: bool = True
) -> None:
    """Raise BadInput unless, in chunks of these sizes, no row depends on the content of other
    places.

    The records are invented. `like` are features and targets of records, of which only shape and
    type are used. With `alive`, rows that are all zero are refused too: a model that raises on
    every record would otherwise pass untested, and answer with noise alone. Without `dim`, rows are
    not computed again if they raise, as `computed` does: whatever raises on an invented record is
    refused.
    """
    for size in sorted(sizes):
        plain, hostile = (_made_up(like, size, bad) for bad in (False, True))
        alone = _bits(rows, *plain, dim)
        if alive and not bool(alone.view(torch.float64).nan_to_num(0.0).any()):
            raise BadInput(
                "this model has no result for a record by itself (it raises, or its "
                "gradient is zero everywhere), so every answer would be noise: "
                "the gate does not serve; use a model that torch.func can differentiate "
                "record by record"
            )
        half = torch.from_numpy(np.random.default_rng(size).permutation(size) % 2 == 0)
        for unchanged in (half, ~half):  # the other places get hostile records
            x, y = (
                torch.where(unchanged.view(-1, *(1,) * (a.dim() - 1)), a, b)
                for a, b in zip(plain, hostile, strict=True)
            )
            if not torch.equal(_bits(rows, x, y, dim)[unchanged], alone[unchanged]):
                raise BadInput(
                    "on this machine a record's result depends on the "
                    f"{size - 1} others that are computed with it, and no noise is "
                    "paid for that: the gate does not serve; use a model of torch's own "
                    "layers, or another build of torch"
                )


def _made_up(like: tuple[Tensor, Tensor], size: int, hostile: bool) -> tuple[Tensor, Tensor]:
    """Return normal features and targets 0, 1, 0, 1 ..., or hostile ones.

    Hostile features include NaN, infinities and the ends of the floats. Hostile targets are absurd.
    """
    rng = np.random.default_rng([size, hostile])
    numbers = rng.normal(size=(size, *like[0].shape[1:]))
    y = torch.arange(size) % 2
    # A person has a target for each of its rows.
    y = y.view(-1, *(1,) * (like[1].dim() - 1)).repeat(1, *like[1].shape[1:])
    if hostile:
        numbers = np.where(
            rng.random(numbers.shape) < 0.5,
            numbers,
            rng.choice([np.nan, np.inf, 3e38, 1e-40, 0.0, -3e38], numbers.shape),
        )
        y = torch.where(y == 0, 2**20, -(2**20))
    return torch.from_numpy(numbers).to(like[0].dtype), y.to(like[1].dtype)


def _bits(rows: Rows, x: Tensor, y: Tensor, dim: int | None) -> Tensor:
    """Return the bits of the rows as integers. Raise BadInput if they cannot be computed."""
    try:
        if dim is None:
            values = rows(_own(x), _own(y))
        else:
            values = computed(rows, x, y, dim)
    except Exception as error:
        raise BadInput(
            "this machine's products of layers fail on an invented record "
            f"({type(error).__name__}), and would after a charge: the gate does not serve; "
            "use another model, or another build of torch"
        ) from error
    # All NaNs get the same bits, which no number has.
    return torch.where(values.isnan(), math.nan, values).view(torch.int64)
