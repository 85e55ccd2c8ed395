"""A guard around an algorithm of the user's own. It reports the errors and the wrong points of the
algorithm in one sentence.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.server.algorithms.signature import Algorithm

PACKAGE = Path(__file__).parents[2]


def guarded(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with a guard around its generator.

    The guarded generator raises BadInput for an error of the algorithm's own lines, or of code
    outside this package that these lines call. It also raises BadInput for an iterate that is not a
    tensor of the shape of w, and for an algorithm without an iterate. Any other error passes
    unchanged.
    """
    name = algorithm.name

    @functools.wraps(algorithm.run)
    def run(fed: Any, problem: Any, w: Tensor, **given: Any) -> Iterator[Tensor]:
        with contextlib.closing(algorithm.run(fed, problem, w, **given)) as iterates:  # type: ignore[type-var]
            for count in itertools.count():
                try:
                    point = next(iterates)
                except StopIteration:
                    if not count:
                        raise BadInput(
                            f"{name} yields no point; it must yield one for each iterate"
                        ) from None
                    return
                except Exception as error:
                    line = _line_at_fault(error, algorithm.run.__code__.co_filename)
                    if line is None:
                        raise
                    message = " ".join(str(error).split())
                    if message:
                        message = f": {message}"
                    raise BadInput(
                        f"{name} raised {type(error).__name__} in line {line}{message}; "
                        "fix the algorithm"
                    ) from None
                if not isinstance(point, Tensor) or point.shape != w.shape:
                    if isinstance(point, Tensor):
                        what = f"a point of the shape {tuple(point.shape)}"
                    else:
                        what = f"a {type(point).__name__}"
                    raise BadInput(
                        f"{name} yields {what}; it must yield points of the shape of w, "
                        f"here {tuple(w.shape)}"
                    )
                yield point

    return replace(algorithm, run=run)


def _line_at_fault(error: BaseException, file: str) -> int | None:
    """Return the last line of the file that the error passed through.

    Return None if the file is not in the traceback, or if code of this package failed after that
    line.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    in_file = [i for i, frame in enumerate(frames) if frame.f_code.co_filename == file]
    if not in_file:
        return None
    last = in_file[-1]
    if any(PACKAGE in Path(frame.f_code.co_filename).parents for frame in frames[last + 1 :]):
        return None
    return lines[last]
