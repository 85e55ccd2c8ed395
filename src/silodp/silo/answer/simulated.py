"""Compute the answers of a gate in simulation: fast batched gradients and seeded generators.

This is not for deployment, and run folders state so. Runs that share a seed share their random
draws (each run by itself has the right law). That makes a sweep's comparisons sharper and its
random numbers cheap.

Two promises of a deployed gate (`exact.py`) are not made here. A sum of n float32 records rounds by
up to n 2^-24 of the clip (in C 0.002 of it more; if the two terms of a difference are far longer
than their sum, by that share of them), which no price covers (1 % of the sensitivity at a million
records). And a record on which a user's own model raises stops the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import Refused
from silodp.core.mechanisms import Gaussian, Mechanism
from silodp.core.mechanisms.totals import as_total
from silodp.core.numbers import CLIP_TOLERANCE, Number
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, Poisson, Sampling, WithoutReplacement
from silodp.core.statistics import LocalSteps, Statistic
from silodp.engine.clipping import ENGINES, clipped_sum
from silodp.engine.native import standard_normals
from silodp.engine.task import Engine
from silodp.silo.data.records import Records

_CHUNK = 2**12
NOISE = (0x51_10_DB,)
"""Sets noise apart from public coins that happen to have the same seed."""


class Simulated:
    """Answers queries over all silos and runs at once.

    `seeds` has one entry per run: an int of any size, or a tuple of them. `engines` compute the
    clipped sums, the first that supports a task.
    """

    label = "simulation: seeded pseudo-random float noise"

    def __init__(
        self,
        problem: Problem,
        records: Records,
        seeds: Sequence[int | tuple[int, ...]],
        *,
        memory: int | None = None,
        engines: Sequence[Engine] = ENGINES,
    ) -> None:
        records.check_unit(problem.person)
        self.problem = problem
        self.records = records
        self.engines = engines
        self.memory = memory or (
            torch.cuda.get_device_properties(records.x.device).total_memory // 8
            if records.x.is_cuda
            else 2**28
        )
        self.features = math.prod(records.x.shape[3 if problem.person else 2 :])
        worlds = {seed: i for i, seed in enumerate(dict.fromkeys(seeds))}
        # NumPy's seeds count to their last bit; torch's CPU generator keeps 32 bits of one, few
        # enough to try them all.
        self._generators = [
            np.random.default_rng(np.random.SeedSequence(seed, spawn_key=NOISE)) for seed in worlds
        ]
        self._world = torch.tensor([worlds[seed] for seed in seeds])
        self._all = tuple(range(len(records)))
        self._everyone = records.mask.to(records.x.dtype)
        self._partitions: dict[tuple[str, int], Tensor] = {}
        self._known: tuple[tuple | None, Tensor | None] = None, None

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        """Return each run's and silo's private answer, (J, M, d).

        It is the mean of its clipped records over the batch plus noise, or the end of its noisy
        local steps.
        """
        if isinstance(query.statistic, LocalSteps):
            return self._local_steps(query.statistic, query.mechanism, silos)
        means = self._means(query.statistic, query.mechanism, silos)
        return self._noisy(means, query.mechanism, silos)

    def _means(self, statistic: Statistic, mechanism: Mechanism, silos: Sequence[int]) -> Tensor:
        """Return each run's and silo's mean of the vectors, (J, M, d), without noise."""
        if statistic.vectors(self.problem, 0) is None:
            w, *reference = statistic.points
            return self._mean(
                w,
                reference[0] if reference else None,
                mechanism,
                silos,
                getattr(statistic, "limit", None),
            )
        sums = torch.zeros(statistic.shape[0], len(silos), statistic.shape[-1], dtype=torch.float64)
        chunk = max(1, min(_CHUNK, 2**24 // statistic.shape[-1]))
        for run in range(len(sums)):
            rows = statistic.vectors(self.problem, run)
            assert rows is not None
            for at, silo in enumerate(silos):
                n = self.records.counts[silo]
                for start in range(0, n, chunk):
                    part = slice(start, min(n, start + chunk))
                    sums[run, at] += (
                        rows(self._view(statistic.view, silo, part), self.records.y[silo, part])
                        .sum(0)
                        .cpu()
                    )
        return sums / self._batch(mechanism.sampling, silos)

    def _view(self, view: str, silo: int, part: slice) -> Tensor:
        x = self.records.x[silo, part]
        absent = self.records.absent
        if view == "filled":
            return x
        if view == "missing":
            return absent[silo, part]
        return x.masked_fill(absent[silo, part], torch.nan)

    def _local_steps(
        self, statistic: LocalSteps, mechanism: Mechanism, silos: Sequence[int]
    ) -> Tensor:
        if isinstance(statistic.step, Tensor):
            step = statistic.step.unsqueeze(-1)
        else:
            step = statistic.step
        start = statistic.w.unsqueeze(1)
        if isinstance(statistic.pull, Tensor):
            drift = statistic.pull.to(start).unsqueeze(1)
        else:
            drift = statistic.pull
        local = start.expand(-1, len(silos), -1)
        for _ in range(statistic.steps):
            g = self._noisy(self._mean(local, None, mechanism, silos), mechanism, silos)
            local = self.problem.prox(local - step * (g + drift), step)
        return local - start

    def _mean(
        self,
        w: Tensor,
        reference: Tensor | None,
        mechanism: Mechanism,
        silos: Sequence[int],
        limit: Number | None = None,
    ) -> Tensor:
        if tuple(silos) == self._all:
            records = self.records
        else:
            records = self.records.select(list(silos))
        weight = self._weight(mechanism.sampling, silos)
        if weight.dim() == 2 and not mechanism.sampling.whole:
            records, weight = _chosen(records, weight)
        total = clipped_sum(
            self.problem,
            w,
            records.x,
            records.y,
            weight,
            mechanism.clip,
            reference=reference,
            limit=limit,
            memory=self.memory,
            engines=self.engines,
        )
        return total.div_(self._batch(mechanism.sampling, silos).to(total))

    def _batch(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        return _batches(sampling, tuple(self.records.counts[s] for s in silos))

    def _noisy(self, mean: Tensor, mechanism: Mechanism, silos: Sequence[int]) -> Tensor:
        """Add the noise of this mechanism. The server and a shuffler do the rest of a total."""
        if not isinstance(mechanism, Gaussian):
            raise Refused("noise")
        noisy = self.gaussian(mechanism, mean, silos)
        if mechanism.total:
            return self._integers(noisy, mechanism, silos)
        return noisy

    def _integers(self, mean: Tensor, mechanism: Gaussian, silos: Sequence[int]) -> Tensor:
        """Return what each silo gives to a total: the sum over its batch in steps of the lattice,
        rounded once, float64.
        """
        unit = as_total(mechanism).steps(mean.shape[-1]).unsqueeze(-1).to(mean.device)
        batch = self._batch(mechanism.sampling, silos).to(mean.device)
        return (mean.double() * batch / unit).round()

    def gaussian(self, mechanism: Gaussian, mean: Tensor, silos: Sequence[int]) -> Tensor:
        """Add N(0, std^2), fresh for each silo, run world and call.

        std = noise multiplier x 2 clip (1 + tolerance) / batch.
        """
        std = self._std(mechanism, silos, mean)
        if std is None:
            return mean
        shape = tuple(mean.shape[1:])
        draws = torch.empty(
            len(self._generators),
            *shape,
            dtype=torch.float32,
            device="cpu",
            pin_memory=mean.is_cuda,
        )
        for generator, world in zip(self._generators, draws.numpy(), strict=True):
            standard_normals(generator, world)
        noise = draws.to(mean, non_blocking=True)
        if len(self._generators) != 1:
            noise = noise[self._world.to(noise.device)]
        return torch.addcmul(mean, std, noise)

    def _std(self, mechanism: Gaussian, silos: Sequence[int], mean: Tensor) -> Tensor | None:
        """Return the deviations, (J, M, 1) or (1, M, 1), as `mean` is, or None if no silo adds
        noise.

        The last ones are returned again if every number that they follow from is the same.
        """
        multiplier = torch.as_tensor(mechanism.noise_multiplier)
        clip = mechanism.clip
        batch = self._batch(mechanism.sampling, silos)
        numbers = None
        if not isinstance(
            clip, Tensor
        ):  # to fetch one from a GPU would be to wait for all it has to do
            bits = (t.cpu().numpy().tobytes() for t in (multiplier, batch))
            numbers = (
                clip,
                *bits,
                multiplier.dtype,
                multiplier.shape,
                tuple(silos),
                mean.dtype,
                mean.device,
            )
        if numbers is None or numbers != self._known[0]:
            if multiplier.ndim and multiplier.shape[-1] == len(self.records):
                multiplier = multiplier[..., list(silos)]
            self._known = (
                numbers,
                _std(multiplier, clip, batch.squeeze(-1), mean)
                if bool((multiplier != 0).any())
                else None,
            )
        return self._known[1]

    def _weight(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        """Return each record's membership in the batch, (M, n), or (J, M, n) if it is drawn per
        world.
        """
        if sampling.whole:
            if tuple(silos) == self._all:
                return self._everyone
            return self._everyone[list(silos)]
        mask = self.records.mask[list(silos)]
        match sampling:
            case Poisson(rate):
                chosen = torch.from_numpy(
                    np.stack([g.random(tuple(mask.shape)) < rate for g in self._generators])
                )
            case WithoutReplacement():
                chosen = torch.stack(
                    [
                        self._ranks(g, silos) < self._batch(sampling, silos).long()
                        for g in self._generators
                    ]
                )
            case DisjointBatches(batches=batches, index=index, partition=name):
                if (name, batches) not in self._partitions:
                    self._partitions[name, batches] = torch.stack(
                        [self._ranks(g, self._all) for g in self._generators]
                    )
                size = self._batch(sampling, silos).long()
                chosen = self._partitions[name, batches][:, list(silos)] // size == index
            case _:
                raise Refused("sampling")
        chosen = chosen.to(mask.device) & mask
        return (
            chosen[0] if len(self._generators) == 1 else chosen[self._world.to(chosen.device)]
        ).to(self.records.x.dtype)

    def _ranks(self, generator: np.random.Generator, silos: Sequence[int]) -> Tensor:
        """Return a random order of each silo's records (padding last), as ranks (M, n)."""
        keys = torch.from_numpy(generator.random((len(silos), self.records.x.shape[1])))
        keys[~self.records.mask[list(silos)].cpu()] = 2.0
        return keys.argsort(1).argsort(1)


@functools.lru_cache
def _batches(sampling: Sampling, counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([[sampling.batch(n)] for n in counts], dtype=torch.float64)


def _std(multiplier: Tensor, clip: Number, batch: Tensor, mean: Tensor) -> Tensor:
    multiplier, clip, batch = (
        torch.as_tensor(v, dtype=torch.float64, device=mean.device)
        for v in (multiplier, clip, batch)
    )
    return (
        torch.where(multiplier == 0, 0.0, multiplier * (2 * clip * (1 + CLIP_TOLERANCE) / batch))
        .unsqueeze(-1)
        .to(mean)
    )


def _chosen(records: Records, weight: Tensor) -> tuple[Records, Tensor]:
    """Return the records of a small batch alone, padded to the largest among the silos."""
    most = max(1, int(weight.count_nonzero(1).max()))
    weight, index = weight.topk(most, dim=1)
    silo = torch.arange(len(index), device=index.device).unsqueeze(1)
    return Records(
        records.x[silo, index], records.y[silo, index], records.counts, records.names
    ), weight
