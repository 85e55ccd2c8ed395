"""An algorithm of the user's own, whose faults are told in a sentence: what it raises itself, and
points that are none.
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
    """The same, but BadInput for an error that comes from its own lines, or from what they call
    outside of this package.
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
                    if (line := _own_line(error, algorithm.run.__code__.co_filename)) is None:
                        raise
                    said = " ".join(str(error).split())
                    raise BadInput(
                        f"{name} raised {type(error).__name__} in line "
                        f"{line}{f': {said}' if said else ''}; mend it"
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


def _own_line(error: BaseException, file: str) -> int | None:
    """The last line of the file that the error came through, unless this package raised it after
    that.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    own = [i for i, frame in enumerate(frames) if frame.f_code.co_filename == file]
    if not own or any(
        PACKAGE in Path(frame.f_code.co_filename).parents for frame in frames[own[-1] + 1 :]
    ):
        return None
    return lines[own[-1]]
