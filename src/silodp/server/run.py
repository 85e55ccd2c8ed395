"""A run over a network from the server's side: cards in, noise calibrated to each silo's own budget, a run folder out.

The folder has run.json (the order, and the cards it was given for), journal (see `journal`), progress.jsonl (see `progress`), and at the
end model.safetensors and summary.json. Everything in it is public, or private already. With the same folder the same run goes on where it was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, rounded_up
from silodp.core.privacy.totals import Schedule
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import Answer, Sealed
from silodp.core.protocol.quote import HoldReply
from silodp.core.sampling import DisjointBatches, FullBatch
from silodp.core.weights import Weights
from silodp.server.algorithms import find
from silodp.server.federation import Everyone, Federation, StopRun
from silodp.server.journal import Journal
from silodp.server.plan import Plan, calibrate
from silodp.server.progress import Progress as Record
from silodp.server.progress import measured, measured_total
from silodp.server.quote import Holds
from silodp.server.remote import MAY_PASS, Card, Carrier, QuestionReport, Remote, Timeouts
from silodp.server.remote_shuffled import ShuffledRemote, Shuffler
from silodp.server.run_totals import agree_on_rule, least_of, plan_totals
from silodp.server.settings import default_shares, participation_by_name, prepared, sampling_by_name
from silodp.server.shuffled import ShuffledFederation


@dataclass(frozen=True)
class Order:
    """What to train, in words and numbers that a file can hold. `epsilon` is what this run may spend at each silo; None: its all."""

    algorithm: str
    rounds: int = 25
    phase: int = 5
    local_steps: int = 5
    inner: int = 5
    restarts: int = 1
    slope: float = 1.0
    momentum: float = 0.9
    kappa: float = 0.7
    step: float = 0.5
    clip: float = 1.0
    epsilon: float | None = None
    sampling: str | None = None
    participation: str = "all"
    anchor_share: float | None = None
    seed: int = 0
    trust: str = "isrl"
    """Or "shuffle": through a shuffler, which passes on totals of `least` silos or more, of all that are asked by default."""
    least: int | None = None


@dataclass(frozen=True)
class Progress:
    """After each iterate: how many there are, who answered the last question, who did not and why, and the part of each silo's
    budget for this run that is left if everything that it was sent has been charged."""

    iterate: int
    answered: tuple[str, ...]
    dropped: dict[str, str]
    left: dict[str, float]
    replayed: bool


def agree(cards: Sequence[Card], problem: Problem, trust: str = "isrl") -> None:
    """Raises BadInput unless all cards are about this very problem: model, loss, prox, features in one order, classes, torch version."""
    if not cards:
        raise BadInput("there is no silo; give the card (silo.json) of each")
    wanted = hashlib.sha256(problem.definition().encode()).hexdigest()
    for card in cards:
        for field in ("model", "prox", "schema", "features", "classes", "definition"):
            if getattr(card, field) != getattr(cards[0], field) and (field != "model" or ".py:" not in card.model):
                raise BadInput(f"silo {card.name} has another {field} than silo {cards[0].name}; all must approve one and the same problem")
        if card.definition != wanted:
            raise BadInput(
                f"silo {card.name} approves the definition {card.definition[:12]}.., but this server's problem is {wanted[:12]}..; "
                f"use the same model, prox and torch version (here {torch.__version__})"
            )
    agree_on_rule(cards, trust)


def plan_order(order: Order, cards: Sequence[Card]) -> tuple[Plan, Any]:
    """The noise with which the whole run fits each silo's budget, and the algorithm ready to run."""
    algorithm = find(order.algorithm)
    names = ("rounds", "phase", "local_steps", "inner", "restarts", "slope", "momentum", "kappa")
    settings = algorithm.schedule({name: getattr(order, name) for name in names})
    sampling = sampling_by_name(order.sampling, algorithm, order.rounds)
    if not isinstance(sampling, FullBatch | DisjointBatches):
        raise BadInput(f"sampling {order.sampling!r} has no price under the rule gdp; use full or disjoint")
    for name in ("step", "clip"):
        if not 0 < getattr(order, name) < np.inf:
            raise BadInput(f"{name} is {getattr(order, name):g}; it must be greater than 0")
    run = prepared(algorithm, settings, order.step)
    mechanisms = {kind: Gaussian(kind, order.clip, 0.0, sampling) for kind in algorithm.kinds}
    budgets = []
    for card in cards:
        if order.epsilon is not None and not 0 < order.epsilon <= card.epsilon:
            raise BadInput(f"epsilon is {order.epsilon:g}, but silo {card.name} has {card.epsilon:g} in all; use at most that, and above 0")
        budgets.append(Budget(order.epsilon or card.epsilon, card.delta))
    participation = participation_by_name(order.participation, len(cards), order.seed)()
    shares = default_shares(algorithm, settings, order.anchor_share)
    if order.trust == "shuffle":
        return plan_totals(run, mechanisms, cards, order.epsilon, participation, least_of(order.least, participation), shares), run
    return calibrate(run, mechanisms, budgets, [card.records for card in cards], participation, shares=shares, rule="gdp"), run


class Conduct:
    """One run, new or continued: iterate over it for progress, then `summary` says how it ended."""

    def __init__(
        self,
        cards: Sequence[Card],
        problem: Problem,
        order: Order,
        carrier: Carrier,
        folder: Path,
        *,
        key: Ed25519PrivateKey,
        quorum: int = 1,
        timeouts: Timeouts | None = None,
        shuffler: Shuffler | None = None,
        held: Callable[[Mapping[str, HoldReply]], None] = lambda held: None,
    ) -> None:
        """Goes on with the run in `folder` if there is one: BadInput unless order, silos and key are the ones that it was made with.

        `held` is told what each silo holds for the run, before the first question goes out.
        """
        agree(cards, problem, order.trust)
        if (order.trust == "shuffle") != bool(shuffler):
            raise BadInput(
                f"the trust is {order.trust}, and a shuffler's card is {'' if shuffler else 'not '}given; the two belong together"
            )
        self._cards, self._problem, self._order, self._folder = tuple(cards), problem, order, folder
        self._plan, self._run = plan_order(order, cards)
        asker, self._there = key.public_key().public_bytes_raw().hex(), folder.exists()
        self.run, config = _open_folder(folder, {"order": dataclasses.asdict(order), "asker": asker, "cards": [_plain(c) for c in cards]})
        with contextlib.ExitStack() as undo:
            self._journal = Journal(folder / "journal", self.run, config)
            undo.callback(self._journal.close)
            if self._journal.new:  # refused, a new run leaves no folder
                undo.callback(_discard, folder, self._there)
            self._tally = _Tally(cards, self._plan, Record(folder, keep=True))
            undo.callback(self._tally.record.close)
            if shuffler:
                quorum = least_of(order.least, self._participation())
            asking = {"run": self.run, "key": key, "timeouts": timeouts or Timeouts(), "quorum": quorum}
            self._holds = Holds(cards, carrier, self._plan, **asking, report=held)
            about: dict[str, Any] = asking | {"journal": self._journal, "report": self._tally.note, "before": self._holds.keep}
            self._remote = ShuffledRemote(cards, carrier, shuffler=shuffler, **about) if shuffler else Remote(cards, carrier, **about)
            undo.pop_all()
        self.total = order.rounds
        self.summary: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Progress]:
        """Runs to the end, clean or early; BadInput if it ends before the first iterate. Afterwards the folder has model and summary."""
        iterates = self._run(self._federation(), self._problem, self._problem.initial([self._order.seed]), **self._plan.mechanisms)
        last: Tensor | None = None
        count, ended, since = 0, "finished", 0
        try:
            for w in iterates:
                if not bool(torch.isfinite(w).all()):
                    raise StopRun("the iterates have diverged; use a smaller step")
                last, count, since = w, count + 1, self._remote.asked
                yield self._tally.progress(count)
        except StopRun as stop:
            ended = str(stop)
            if self._remote.pending:
                self._tally.charge(*self._remote.pending)
            self._journal.stop(since)
        except BadInput:
            if self._journal.new and not self._remote.asked and not self._remote.pending:  # no question has gone out
                _discard(self._folder, self._there)
            raise
        finally:
            self._holds.release()
            self._journal.close()
            self._tally.record.close()
        if last is None:
            spent = ", ".join(f"{name} epsilon {rounded_up(value, 4)}" for name, value in self._tally.spent().items())
            raise BadInput(f"the run ended before its first iterate: {ended}; spent at most: {spent}; it can be resumed")
        self.summary = self._write(last, count, ended)

    def _participation(self) -> Everyone:
        return participation_by_name(self._order.participation, len(self._cards), self._order.seed)()

    def _federation(self) -> Federation:
        if self._order.trust != "shuffle":
            return Federation(self._remote, self._participation())
        weights = Weights("records", tuple(card.records for card in self._cards), tuple(card.held_out for card in self._cards))
        return ShuffledFederation(self._remote, self._participation(), weights)

    def _write(self, w: Tensor, count: int, ended: str) -> dict[str, Any]:
        parameters = {name: value[0].contiguous() for name, value in self._problem.split(w).items()}
        about = {"model": self._cards[0].model, "prox": self._cards[0].prox, "algorithm": self._order.algorithm}
        about |= {"schema": self._cards[0].schema} if self._cards[0].schema else {}
        save_file(parameters, self._folder / "model.safetensors", metadata=about)
        summary = {
            "run": self.run, "ended": ended, "algorithm": self._order.algorithm, "iterates": count, "questions": self._tally.questions,
            "parameters": self._problem.dim, "silos": self._tally.silos(self._remote.retired),
            "model": str(self._folder / "model.safetensors"),
        }  # fmt: skip
        if self._order.trust == "shuffle":
            summary |= {"trust": "shuffle", "said": AGAINST}
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        return summary


class _Tally:
    """What each silo was asked, answered and may have been charged."""

    def __init__(self, cards: Sequence[Card], plan: Plan, record: Record) -> None:
        self._cards, self._plan, self.record, self._iterates = cards, plan, record, 0
        self._charged: list[dict[str, float]] = [{} for _ in cards]
        self._totals = [(Schedule(), Schedule()) for _ in cards]  # as the server and as the shuffler sees them
        self._answered, self._dropped = Counter[str](), {card.name: Counter[str]() for card in cards}
        self._ledgers: dict[str, dict] = {}
        self._last: QuestionReport | None = None
        self.questions = 0

    def note(self, told: QuestionReport, answers: Mapping[str, Answer | Sealed]) -> None:
        self._last, self.questions = told, self.questions + 1
        self._answered.update(told.answered)
        for name, code in told.dropped.items():
            self._dropped[name][code] += 1
        for name, answer in answers.items():
            self._ledgers[name] = {"count": answer.count, "head": answer.head}
        maybe = {name for name, code in told.dropped.items() if code in MAY_PASS or code in ("silent", "forged", "value")}
        self.charge(told.event, maybe | answers.keys())
        self._look(told, answers)

    def charge(self, event: Event | TotalEvent, names: Collection[str]) -> None:
        """Counts the event at each of these silos."""
        multipliers = np.broadcast_to(np.asarray(event.noise_multiplier), (1, len(self._cards)))[0] if isinstance(event, Event) else ()
        for i, card in enumerate(self._cards):
            if card.name in names:
                own = replace(event, noise_multiplier=float(multipliers[i])) if isinstance(event, Event) else event
                bucket, price = self._plan.rule.price(own, np.asarray(card.records))
                self._charged[i][bucket] = self._charged[i].get(bucket, 0.0) + np.asarray(price).item()
                if isinstance(own, TotalEvent):
                    self._totals[i][0].add(bucket, own)
                    self._totals[i][1].add(bucket, own, int(own.sampling.batch(card.records)))

    def _look(self, told: QuestionReport, answers: Mapping[str, Answer | Sealed]) -> None:
        names, counts = [card.name for card in self._cards], [card.records - card.held_out for card in self._cards]  # those trained on
        used = {name: 1 - share for name, share in self.left().items()}
        line = {"round": self._iterates + 1, "used": used, "epsilon": self.spent(), "dropped": told.dropped}
        if told.total:
            line |= measured_total(told.query, *told.total, told.answered)
        else:
            found = {i: answer.value for i, name in enumerate(names) if isinstance(answer := answers.get(name), Answer)}
            values = torch.cat([*found.values()]) if found else torch.zeros(0, told.query.statistic.shape[-1])
            line |= measured(told.query, values, list(found), counts, names)
        self.record.write(told.sequence, line, replayed=told.replayed)

    def progress(self, count: int) -> Progress:
        told = self._last
        assert told is not None
        self._iterates = count
        return Progress(count, told.answered, told.dropped, self.left(), told.replayed)

    def left(self) -> dict[str, float]:
        rule = self._plan.rule
        capacity = rule.capacity(self._plan.budgets)[0]
        spent = [float(rule.total({k: np.asarray(v) for k, v in mine.items()})) if mine else 0.0 for mine in self._charged]
        return {card.name: 1 - s / float(c) for card, s, c in zip(self._cards, spent, capacity, strict=True)}

    def spent(self) -> dict[str, float]:
        """At each silo's own delta, which its ledger has too."""
        found = {}
        for card, mine, (seen, _) in zip(self._cards, self._charged, self._totals, strict=True):
            buckets = {bucket: np.asarray(price) for bucket, price in mine.items()}
            totals = self._plan.rule.name == "totals"
            found[card.name] = seen.epsilon(card.delta) if totals else self._plan.rule.epsilon(buckets, np.asarray(card.delta)).item()
        return found

    def silos(self, retired: Mapping[str, str]) -> list[dict[str, Any]]:
        found = []
        for i, (card, spent, budget) in enumerate(zip(self._cards, self.spent().values(), self._plan.budgets[0], strict=True)):
            row = {
                "name": card.name, "epsilon": budget.epsilon, "delta": card.delta, "spent_epsilon_at_most": spent,
                "answered": self._answered[card.name], "dropped": dict(self._dropped[card.name]), "retired": retired.get(card.name),
                "ledger": self._ledgers.get(card.name),
            }  # fmt: skip
            if self._plan.rule.name == "totals":
                local = self._totals[i][1].epsilon(card.delta)
                row["local_epsilon_at_most"] = local if math.isfinite(local) else None
            found.append(row)
        return found


AGAINST = (
    "epsilon is against the server, which sees totals, unless it says otherwise; the shuffler, or whoever else sees a silo's own counts, "
    "is up against that silo's own noise alone"
)


def _discard(folder: Path, kept: bool) -> None:
    """Takes away what a new run wrote before its first question; the folder too, unless it was there before."""
    for name in ("journal", "progress.jsonl", "run.json"):
        (folder / name).unlink(missing_ok=True)
    if not kept:
        with contextlib.suppress(OSError):  # what others have put there stays
            folder.rmdir()


def _plain(card: Card) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(card)))


def _open_folder(folder: Path, wanted: dict[str, Any]) -> tuple[str, str]:
    """The run's id and the hash of its configuration; a new folder gets a new id."""
    path = folder / "run.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            found = json.loads(path.read_text())
            differs = [field for field in wanted if found.get(field) != json.loads(json.dumps(wanted[field]))]
            if differs:
                raise BadInput(
                    f"{folder} holds a run with another {' and '.join(differs)}; choose another folder, or resume that run as it is"
                )
            run = str(found["run"])
        else:
            run = secrets.token_hex(16)
            text = json.dumps({"run": run} | wanted, indent=1) + "\n"
            part = folder / "run.json.part"
            part.write_text(text)
            part.replace(path)
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise BadInput(f"the run folder {folder} cannot be used ({type(error).__name__}); choose another") from None
    return run, hashlib.sha256(json.dumps({"run": run} | wanted, sort_keys=True).encode()).hexdigest()
