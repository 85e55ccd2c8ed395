"""Units of studies on a Ray cluster, `python -m research figures --on ray`: each is a task of one
core, or of a share of a GPU, wherever there is one.

Only whoever began writes the folder, so that it goes on as ever after an interruption. Every
machine needs this silodp, and data sets and files of one's own at the same paths. Ray carries
functions as pickles between its machines, which trust each other: nothing here is near a silo's
records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from silodp.core.errors import BadInput
from silodp.simulation.sweep import SHARING

Result = TypeVar("Result")


class Cluster:
    """The cluster at RAY_ADDRESS or, without one, Ray's own processes on this machine; left as it
    was found.
    """

    def __init__(self) -> None:
        self._ray = _imported()
        self._began = not self._ray.is_initialized()
        if self._began:
            try:
                self._ray.init(
                    address=os.environ.get("RAY_ADDRESS", "local"),
                    log_to_driver=False,
                    include_dashboard=False,
                )
            except ConnectionError:
                raise BadInput(
                    f"no Ray cluster answers at RAY_ADDRESS, {os.environ['RAY_ADDRESS']}; "
                    "start one, or unset it"
                ) from None

    @property
    def gpus(self) -> bool:
        return self._ray.cluster_resources().get("GPU", 0) > 0

    def spread(
        self, work: Callable[..., Result], tasks: Sequence[tuple], on_gpu: Sequence[tuple]
    ) -> Iterator[Result]:
        """Results as they finish. A machine that is lost costs its tasks another try; what a task
        raises is raised here.
        """
        ray = self._ray
        one = self._ray.remote(_one)
        gpu = one.options(num_cpus=1, num_gpus=1 / SHARING)
        cpu = one.options(num_cpus=1)
        waiting = [
            kind.remote(work, task) for kind, some in ((gpu, on_gpu), (cpu, tasks)) for task in some
        ]
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                yield ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        finally:
            for left in waiting:
                ray.cancel(left, force=True)

    def close(self) -> None:
        if self._began:
            self._ray.shutdown()


def _imported() -> ModuleType:
    os.environ.setdefault(
        "RAY_USAGE_STATS_ENABLED", "0"
    )  # it would tell its makers of every cluster
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise BadInput(
            "Ray is not installed; `pip install 'silodp[ray]'` installs it, or leave --on ray out"
        ) from None
    return ray


def _one(work: Callable[..., Any], task: tuple) -> Any:
    torch.set_num_threads(1)
    return work(*task)
