"""The count of a run over a network: questions, answers and possible charges of each silo."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from silodp.core.events import Event, TotalEvent
from silodp.server.journal import Heard
from silodp.server.plan import Plan
from silodp.server.progress import Progress as Record
from silodp.server.progress import measured_norms, measured_total
from silodp.server.remote import Card, QuestionReport


@dataclass(frozen=True)
class Progress:
    """The progress after an iterate: the number of iterates, and the outcome of the last question.

    `left` is the part of each silo's budget for this run that is left if every possible charge was
    made.
    """

    iterate: int
    answered: tuple[str, ...]
    dropped: dict[str, str]
    left: dict[str, float]
    replayed: bool


class Spending:
    """Count what each silo was asked, answered and may have been charged."""

    def __init__(self, cards: Sequence[Card], plan: Plan, record: Record) -> None:
        self._cards = cards
        self._plan = plan
        self.record = record
        self._iterates = 0
        self._charged: list[dict[str, float]] = [{} for _ in cards]
        """Prices by bucket, for each silo."""
        self._alone: list[dict[str, float]] = [{} for _ in cards]
        """The same prices against a party that sees the silo's own numbers."""
        self._answered = Counter[str]()
        self._dropped = {card.name: Counter[str]() for card in cards}
        self._ledgers: dict[str, dict] = {}
        self._last: QuestionReport | None = None
        self.questions = 0

    def note(self, report: QuestionReport, heard: Mapping[str, Heard]) -> None:
        """Count a question that is settled, and write its line of progress."""
        self._last = report
        self.questions += 1
        self._answered.update(report.answered)
        for name, code in report.dropped.items():
            self._dropped[name][code] += 1
        for name, reply in heard.items():
            self._ledgers[name] = {"count": reply.count, "head": reply.head}
        for event, names in report.lost:
            self.charge(event, names)
        self.charge(report.event, report.maybe_charged)
        self._write_line(report, heard)

    def charge(self, event: Event | TotalEvent, names: Collection[str]) -> None:
        """Count the event as charged at each of these silos."""
        for i, card in enumerate(self._cards):
            if card.name not in names:
                continue
            own = event.of(i)
            for event_seen, prices in ((own, self._charged[i]), (own.alone(), self._alone[i])):
                bucket, price = self._plan.rule.price(event_seen, np.asarray(card.records))
                prices[bucket] = prices.get(bucket, 0.0) + np.asarray(price).item()

    def ahead(
        self, question: int, charges: Iterable[tuple[Event | TotalEvent, Collection[str]]]
    ) -> None:
        """Write what silos will have spent after this question if these charges are made too."""
        after = copy.copy(self)
        after._charged = copy.deepcopy(self._charged)
        after._alone = copy.deepcopy(self._alone)
        for event, names in charges:
            after.charge(event, names)
        self.record.ahead(question, after._paid())

    def _paid(self) -> dict[str, Any]:
        """Return the used share of each silo's budget, and the epsilon spent, for a line of
        progress.
        """
        return {
            "used": {name: 1 - share for name, share in self.left().items()},
            "epsilon": self.spent(),
        }

    def _write_line(self, report: QuestionReport, heard: Mapping[str, Heard]) -> None:
        """Write the question's line of progress."""
        names = [card.name for card in self._cards]
        trained_on = [card.records - card.held_out for card in self._cards]
        line = {"round": self._iterates + 1, **self._paid(), "dropped": report.dropped}
        if report.total:
            line |= measured_total(report.query, *report.total, report.answered)
        else:
            norms = {i: heard[name].norm or 0.0 for i, name in enumerate(names) if name in heard}
            line |= measured_norms(
                report.query,
                list(norms.values()),
                report.norm,
                list(norms),
                trained_on,
                names,
                report.shares,
            )
        self.record.write(report.sequence, line, replayed=report.replayed)

    def progress(self, count: int) -> Progress:
        """Return the progress after so many iterates."""
        report = self._last
        assert report is not None, "an iterate follows a question"
        self._iterates = count
        return Progress(count, report.answered, report.dropped, self.left(), report.replayed)

    def left(self) -> dict[str, float]:
        """Return the part of each silo's budget for the run that is left."""
        rule = self._plan.rule
        capacity = rule.capacity(self._plan.budgets)[0]
        spent = []
        for charged in self._charged:
            buckets = {bucket: np.asarray(price) for bucket, price in charged.items()}
            # A rule has no total of nothing.
            spent.append(float(rule.total(buckets)) if buckets else 0.0)
        return {
            card.name: 1 - s / float(c)
            for card, s, c in zip(self._cards, spent, capacity, strict=True)
        }

    def spent(self) -> dict[str, float]:
        """Return the epsilon that each silo has spent at most, at its ledger's own delta."""
        return {
            card.name: self._epsilon(prices, card.delta)
            for card, prices in zip(self._cards, self._charged, strict=True)
        }

    def _epsilon(self, prices: Mapping[str, float], delta: float) -> float:
        """Return what these prices by bucket cost together."""
        buckets = {bucket: np.asarray(price) for bucket, price in prices.items()}
        return self._plan.rule.epsilon(buckets, np.asarray(delta)).item()

    def silos(self, retired: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return a row for each silo, for the run's summary."""
        rows = []
        for i, (card, spent, budget) in enumerate(
            zip(self._cards, self.spent().values(), self._plan.budgets[0], strict=True)
        ):
            row = {
                "name": card.name,
                "epsilon": budget.epsilon,
                "delta": card.delta,
                "spent_epsilon_at_most": spent,
                "answered": self._answered[card.name],
                "dropped": dict(self._dropped[card.name]),
                "retired": retired.get(card.name),
                "ledger": self._ledgers.get(card.name),
            }
            if any(mechanism.total for mechanism in self._plan.mechanisms.values()):
                local = self._epsilon(self._alone[i], card.delta)
                row["local_epsilon_at_most"] = local if math.isfinite(local) else None
            rows.append(row)
        return rows
