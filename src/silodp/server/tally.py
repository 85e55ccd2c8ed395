"""What each silo of a run over a network was asked, answered and may have been charged, question by
question.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from silodp.core.events import Event, TotalEvent
from silodp.core.privacy.totals import Schedule
from silodp.server.journal import Heard
from silodp.server.plan import Plan
from silodp.server.progress import Progress as Record
from silodp.server.progress import measured_norms, measured_total
from silodp.server.remote import Card, QuestionReport


@dataclass(frozen=True)
class Progress:
    """After each iterate: how many there are, who answered the last question, who did not and why,
    and the part of each silo's budget for this run that is left if everything that it was sent has
    been charged."""

    iterate: int
    answered: tuple[str, ...]
    dropped: dict[str, str]
    left: dict[str, float]
    replayed: bool


class SeenTotals:
    """What totals of one silo's records have cost so far: before the server, and before whoever
    sees the silo's own counts.
    """

    def __init__(self) -> None:
        self._server, self._shuffler = Schedule(), Schedule()

    def add(self, bucket: str, event: TotalEvent, records: int) -> None:
        self._server.add(bucket, event)
        self._shuffler.add(bucket, event, int(event.sampling.batch(records)))

    def epsilon(self, delta: float) -> float:
        return self._server.epsilon(delta)

    def local(self, delta: float) -> float | None:
        """None where there is no bound."""
        found = self._shuffler.epsilon(delta)
        return found if math.isfinite(found) else None


class Tally:
    """What each silo was asked, answered and may have been charged."""

    def __init__(self, cards: Sequence[Card], plan: Plan, record: Record) -> None:
        self._cards, self._plan, self.record, self._iterates = cards, plan, record, 0
        self._charged: list[dict[str, float]] = [{} for _ in cards]
        self._totals = [SeenTotals() for _ in cards]
        self._answered, self._dropped = (
            Counter[str](),
            {card.name: Counter[str]() for card in cards},
        )
        self._ledgers: dict[str, dict] = {}
        self._last: QuestionReport | None = None
        self.questions = 0

    def note(self, told: QuestionReport, heard: Mapping[str, Heard]) -> None:
        self._last, self.questions = told, self.questions + 1
        self._answered.update(told.answered)
        for name, code in told.dropped.items():
            self._dropped[name][code] += 1
        for name, reply in heard.items():
            self._ledgers[name] = {"count": reply.count, "head": reply.head}
        for event, names in (*told.lost, (told.event, told.maybe_charged)):
            self.charge(event, names)
        self._look(told, heard)

    def charge(self, event: Event | TotalEvent, names: Collection[str]) -> None:
        """Counts the event at each of these silos."""
        for i, card in enumerate(self._cards):
            if card.name in names:
                own = event.of(i)
                bucket, price = self._plan.rule.price(own, np.asarray(card.records))
                self._charged[i][bucket] = (
                    self._charged[i].get(bucket, 0.0) + np.asarray(price).item()
                )
                if own.total:
                    self._totals[i].add(bucket, cast(TotalEvent, own), card.records)

    def ahead(
        self, question: int, charges: Iterable[tuple[Event | TotalEvent, Collection[str]]]
    ) -> None:
        """Writes down what silos will have spent by this question if these are charged too."""
        after = copy.copy(self)
        after._charged, after._totals = copy.deepcopy((self._charged, self._totals))
        for event, names in charges:
            after.charge(event, names)
        self.record.ahead(question, after._paid())

    def _paid(self) -> dict[str, Any]:
        return {
            "used": {name: 1 - share for name, share in self.left().items()},
            "epsilon": self.spent(),
        }

    def _look(self, told: QuestionReport, heard: Mapping[str, Heard]) -> None:
        names, counts = (
            [card.name for card in self._cards],
            [card.records - card.held_out for card in self._cards],
        )  # those trained on
        line = {"round": self._iterates + 1, **self._paid(), "dropped": told.dropped}
        if told.total:
            line |= measured_total(told.query, *told.total, told.answered)
        else:
            norms = {i: heard[name].norm or 0.0 for i, name in enumerate(names) if name in heard}
            line |= measured_norms(
                told.query, [*norms.values()], told.norm, list(norms), counts, names, told.shares
            )
        self.record.write(told.sequence, line, replayed=told.replayed)

    def progress(self, count: int) -> Progress:
        told = self._last
        assert told is not None
        self._iterates = count
        return Progress(count, told.answered, told.dropped, self.left(), told.replayed)

    def left(self) -> dict[str, float]:
        rule = self._plan.rule
        capacity = rule.capacity(self._plan.budgets)[0]
        spent = [
            float(rule.total({k: np.asarray(v) for k, v in mine.items()})) if mine else 0.0
            for mine in self._charged
        ]
        return {
            card.name: 1 - s / float(c)
            for card, s, c in zip(self._cards, spent, capacity, strict=True)
        }

    def spent(self) -> dict[str, float]:
        """At each silo's own delta, which its ledger has too."""
        found = {}
        for card, mine, seen in zip(self._cards, self._charged, self._totals, strict=True):
            buckets = {bucket: np.asarray(price) for bucket, price in mine.items()}
            totals = self._plan.rule.name == "totals"
            found[card.name] = (
                seen.epsilon(card.delta)
                if totals
                else self._plan.rule.epsilon(buckets, np.asarray(card.delta)).item()
            )
        return found

    def silos(self, retired: Mapping[str, str]) -> list[dict[str, Any]]:
        found = []
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
            if self._plan.rule.name == "totals":
                row["local_epsilon_at_most"] = self._totals[i].local(card.delta)
            found.append(row)
        return found
