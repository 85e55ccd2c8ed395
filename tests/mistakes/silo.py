"""Mistakes in a silo: in clipping, noise, sampling, plan, ledger and gate."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from mistakes import Mistakes, during, keyed
from silodp.core.errors import Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Mechanism
from silodp.core.problem.person import filled, present
from silodp.core.protocol.codec import decode_query, decode_reply, encode_reply
from silodp.core.query import Query, Release
from silodp.core.sampling import FullBatch, Sampling, WithoutReplacement
from silodp.engine.clipping import clipped_sum
from silodp.server.plan import Plan, calibrate
from silodp.silo.answer.exact import Exact, Gradients, lattice_step, quantised
from silodp.silo.answer.simulated import Simulated
from silodp.silo.gate import Gate
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.ledger.memory import MemoryLedger
from silodp.silo.service.door import Door

OF_A_SILO = Mistakes()
plant = OF_A_SILO.plant

# --- clipping ------------------------------------------------------------------------------------


class ByHand(Simulated):
    """Clips records one by one, in float32, as many a script does; `scaled` says how, of gradients
    or differences g.
    """

    def _mean(
        self,
        w: Tensor,
        reference: Tensor | None,
        mechanism: Mechanism,
        silos: Sequence[int],
        limit: Any = None,
    ) -> Tensor:
        at, points = list(silos), [p for p in (w, reference) if p is not None]
        x, y, weight = self.records.x[at], self.records.y[at], self._weight(mechanism.sampling, at)
        runs = points[0].shape[0]

        def loss(point: Tensor, x: Tensor, y: Tensor) -> Tensor:
            output = functional_call(self.problem.model, self.problem.split(point), (x[None],))
            return self.problem.record_loss(output[0], y)

        each = vmap(vmap(vmap(grad(loss), (None, 0, 0)), (0, 0, 0)), (0, None, None))
        rows = [
            each(p[:, None].expand(-1, len(at), -1) if p.dim() == 2 else p, x, y) for p in points
        ]
        clip = (
            torch.as_tensor(mechanism.clip, dtype=w.dtype)
            .reshape(-1, 1, 1, 1)
            .expand(runs, 1, 1, 1)
        )
        weight = weight.expand(runs, *weight.shape[-2:])
        g = rows[0] if len(rows) == 1 else rows[0] - rows[1]
        total = (self.scaled(g, rows, clip) * weight[..., None]).sum(2)
        return total / self._batch(mechanism.sampling, at).to(total)

    def scaled(self, g: Tensor, rows: list[Tensor], clip: Tensor) -> Tensor:
        raise NotImplementedError


@plant("per-layer clipping", "answerer")
class PerLayer(ByHand):
    """Each tensor of a record's gradient is clipped alone (the paper's published code)."""

    def scaled(self, g: Tensor, rows: list[Tensor], clip: Tensor) -> Tensor:
        parts = [
            part * (clip / part.norm(dim=-1, keepdim=True).clamp_min(1e-30)).clamp(max=1)
            for part in g.split(self.problem.sizes, -1)
        ]
        return torch.cat(parts, -1).nan_to_num(0.0, 0.0, 0.0)


@plant("NaN that passes the clip", "answerer")
class PassesNaN(ByHand):
    """if norm > clip: scale. A comparison with NaN is false, so a NaN is not scaled."""

    def scaled(self, g: Tensor, rows: list[Tensor], clip: Tensor) -> Tensor:
        norm = g.norm(dim=-1, keepdim=True)
        return torch.where(norm > clip, g * (clip / norm), g)


@plant("difference norms by the cancelling formula", "answerer")
class Cancelling(ByHand):
    """||g1 - g2||^2 as ||g1||^2 + ||g2||^2 - 2 g1.g2 in float32, which cancels when the points are
    close.
    """

    def scaled(self, g: Tensor, rows: list[Tensor], clip: Tensor) -> Tensor:
        square = sum(r.square().sum(-1, keepdim=True) for r in rows) - (
            2 * (rows[0] * rows[1]).sum(-1, keepdim=True) if len(rows) > 1 else 0
        )
        scaled = g * (clip / torch.as_tensor(square).clamp_min(0).sqrt()).clamp(max=1)
        return torch.where(torch.isfinite(scaled).all(-1, keepdim=True), scaled, 0.0)


@plant("data-dependent clip", "answerer")
class MedianClip(Simulated):
    """The clip is the median of the silo's own gradient norms, and the noise follows it (adaptive
    clipping that nobody paid for).
    """

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        class Norms(ByHand):
            def scaled(self, g: Tensor, rows: list[Tensor], clip: Tensor) -> Tensor:
                found.append(g.norm(dim=-1).flatten(1).median(1, keepdim=True).values)
                return g

        found: list[Tensor] = []
        statistic = query.statistic
        norms = Norms(self.problem, self.records, [0])
        norms._mean(
            statistic.w,
            getattr(statistic, "reference", None),
            replace(query.mechanism, sampling=FullBatch()),
            silos,
        )  # type: ignore[union-attr]
        return super().answer(
            replace(query, mechanism=query.mechanism.clipped(found[0].nan_to_num(1.0))), silos
        )


@plant("clips rows, not persons", "answerer")
class ClipsRows(Simulated):
    """Clips each row and adds a person's rows up: what a person can move is as many clips as it has
    rows.
    """

    def _mean(
        self,
        w: Tensor,
        reference: Tensor | None,
        mechanism: Mechanism,
        silos: Sequence[int],
        limit: Any = None,
    ) -> Tensor:
        if self.problem.person is None:
            return super()._mean(w, reference, mechanism, silos, limit)
        r = self.records
        parts = (
            r.x.flatten(1, 2),
            filled(r.y).flatten(1, 2),
            present(r.y).flatten(1, 2).to(r.x.dtype),
        )
        return (
            clipped_sum(self.problem.by_row, w, *parts, mechanism.clip, reference=reference)
            / r.counts[0]
        )


@plant("clips rows, not persons, at the gate", "exact")
class ClipsRowsAtTheGate(Exact):
    """The same in the integers of a deployed gate: each row's are verified, and a person's rows
    added up.
    """

    def _sum(
        self,
        rows: Any,
        chosen: np.ndarray,
        clip: float,
        gamma: float,
        dim: int,
        *given: Any,
        **more: Any,
    ) -> np.ndarray:
        if self.problem.person is None or not isinstance(rows, Gradients):
            return super()._sum(rows, chosen, clip, gamma, dim, *given, **more)
        y = self._y[chosen].flatten()
        x, y = self._x[chosen].flatten(0, 1)[present(y)], y[present(y)]
        return (
            quantised(
                Gradients(self.problem.by_row, rows.points)(x.double(), y.double()), clip, gamma
            )
            .sum(0)
            .numpy()
        )


# --- noise ---------------------------------------------------------------------------------------


@plant("noise for half the sensitivity", "answerer")
class HalfSensitivity(Simulated):
    """Noise for L / n where replacing a record moves the mean by 2 L / n."""

    def _noisy(self, mean: Tensor, mechanism: Mechanism, silos: Sequence[int]) -> Tensor:
        return super()._noisy(
            mean, replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2), silos
        )


@plant("noise only on anchors", "answerer")
class AnchorsOnly(Simulated):
    """Differences are small, so they are sent as they are."""

    def answer(self, query: Query, silos: Sequence[int]) -> Tensor:
        if hasattr(query.statistic, "reference"):
            query = replace(query, mechanism=replace(query.mechanism, noise_multiplier=0.0))
        return super().answer(query, silos)


@plant("the same noise in two rounds", "answerer")
class SameNoise(Simulated):
    """Every round draws from the beginning of the same stream (noise files that are loaded
    again).
    """

    def _noisy(self, mean: Tensor, mechanism: Mechanism, silos: Sequence[int]) -> Tensor:
        beginning = copy.deepcopy(self._generators)
        noisy = super()._noisy(mean, mechanism, silos)
        self._generators = beginning
        return noisy


@plant("noise shared between silos", "answerer")
class SharedNoise(Simulated):
    """One draw for all silos, each scaled to its own standard deviation."""

    def _noisy(self, mean: Tensor, mechanism: Mechanism, silos: Sequence[int]) -> Tensor:
        own = super()._noisy(torch.zeros_like(mean), mechanism, silos)
        batch = self._batch(mechanism.sampling, silos).to(mean)
        return mean + own[:, :1] * batch[0] / batch


@plant("float noise without lattice", "exact")
class FloatNoise(Exact):
    """The right sum and the right standard deviation, in float64 and off the lattice (Mironov
    2012).
    """

    def _release(self, rows: Any, mechanism: Any, dim: int, *others: Any, **more: Any) -> Any:
        clip = float(mechanism.clip)
        gamma = lattice_step(clip, dim)
        total = self._sum(rows, self._batch(mechanism.sampling), clip, gamma, dim)
        scale = float(mechanism.noise_multiplier) * 2 * clip / gamma
        return total + scale * torch.randn(dim, dtype=torch.float64).numpy()


# The keystream's key is a hash of what the server sent (Fed-BioMed let the server seed the noise).
plant("seed from the server", "door")(
    during(Door, "_answer", lambda door, words: keyed(hashlib.sha256(words[0]).digest()))
)


# --- sampling, plan, ledger, gate ----------------------------------------------------------------


@plant("sampling with replacement accounted as without", "answerer")
class WithReplacement(Simulated):
    """np.random.choice without replace=False: a record can be in a batch twice."""

    def _weight(self, sampling: Sampling, silos: Sequence[int]) -> Tensor:
        if not isinstance(sampling, WithoutReplacement):
            return super()._weight(sampling, silos)
        random = np.random.default_rng(len(silos))
        drawn = torch.zeros(len(self._world), len(silos), self.records.x.shape[1])
        for i, n in enumerate(self.records.counts[s] for s in silos):
            rate = np.full(n, 1 / n)
            drawn[:, i, :n] = torch.from_numpy(
                random.multinomial(int(sampling.batch(n)), rate, size=len(drawn))
            )
        return drawn


@plant("anchors and differences each given the whole exact budget", "calibrate")
def whole_budget_each(
    run, mechanisms, budgets, counts, participation=None, *, shares=None, rule=None
) -> Plan:
    """Anchors are calibrated to the whole budget, and differences to the whole budget again (the
    paper's alternate SPIDER).
    """
    plan = calibrate(run, mechanisms, budgets, counts, participation, shares=shares, rule=rule)
    given = shares or dict.fromkeys(mechanisms, 1 / len(mechanisms))
    full = {
        kind: replace(m, noise_multiplier=m.noise_multiplier * given[kind] ** 0.5)
        for kind, m in plan.mechanisms.items()
    }
    return replace(plan, mechanisms=full)


@plant("anchors and differences each given the whole exact budget", "ledger")
class NoFilter(MemoryLedger):
    """Counts, and lets everything pass."""

    def charge(self, event: Event | TotalEvent, silos: Sequence[int]) -> None:
        with contextlib.suppress(Refused):
            super().charge(event, silos)


@plant("answer before charge", "gate")
class AnswersFirst(Gate):
    """Computes, and then checks and charges for what it has computed."""

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        value = self._answerer.answer(query, silos)
        computed: Any = SimpleNamespace(features=0, answer=lambda query, silos: value)
        return Gate(
            computed, self.ledger, dim=self._dim, counts=self._counts, runs=self._runs
        ).answer(query, silos)


@dataclass(frozen=True, eq=False)
class WithLoss(Release):
    loss: float = 0.0


@plant("raw loss in the reply", "gate")
class SendsLoss(Gate):
    """The mean training loss rides along, for the learning curve."""

    def answer(self, query: Query, silos: Sequence[int]) -> Release:
        release = super().answer(query, silos)
        return WithLoss(
            release.value, release.silos, release.event, raw_loss(self._answerer, query)
        )


@plant("raw loss in the reply", "door")
class DoorSendsLoss(Door):
    """The same in deployment: one number more than was asked for."""

    def _answer(self, frame: bytes) -> bytes:
        reply, query = opened(super()._answer(frame), frame)
        loss = torch.tensor([[raw_loss(self._exact, query)]], dtype=reply.value.dtype)
        return encode_reply(replace(reply, value=torch.cat([reply.value, loss], 1)), self._key)


def opened(reply: bytes, frame: bytes) -> tuple[Any, Query]:
    """The reply of a door, and the query that it was asked."""
    return decode_reply(reply, limit=2**62), decode_query(frame, limit=2**62)[0].query


def raw_loss(answerer: object, query: Query) -> float:
    if isinstance(answerer, Simulated):
        x, y = answerer.records.x[0], answerer.records.y[0]
    elif isinstance(answerer, Exact):
        x, y = answerer._x, answerer._y
    else:
        return 0.0
    return float(answerer.problem.losses(query.statistic.w.to(x), x, y).mean())  # type: ignore[union-attr]


@plant("retry with fresh noise", "door")
class ForgetsAnswers(Door):
    """A retry is a query like any other, except that it was paid for already."""

    def _answer(self, frame: bytes) -> bytes:
        reply, query = opened(super()._answer(frame), frame)
        return encode_reply(replace(reply, value=self._exact.answer(query, [0])[0]), self._key)


@plant("ledger reset on restart", "reopen")
def begins_anew(path: Path) -> DurableLedger:
    """At every start the ledger and its anchor are as they were when they were made."""
    anchor = Path(f"{path}.anchor")
    for file in (path, anchor):
        made = file.with_name(f"{file.name}.made")
        if made.exists():
            shutil.copy(made, file)
        elif file.exists():
            shutil.copy(file, made)
    return DurableLedger.open(path)
