"""A run over a network, on the server's side. The inputs are the silos' cards. The noise is
calibrated to each silo's own budget. The result is a run folder.

The folder has run.json (the order, and the cards it was given for), journal (see `journal`) and
progress.jsonl (see `progress`). At the end it also has model.safetensors and summary.json.
Everything in it is public, or private already. With the same folder the same run continues where it
was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.events import Event, TotalEvent
from silodp.core.figures import rounded_up
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.problem import Problem
from silodp.core.problem.reading import plain_text
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.core.protocol.quote import HoldReply
from silodp.core.sampling import DisjointBatches
from silodp.host.model import facts
from silodp.runs import RunFolder
from silodp.server.advice import Advice, Facts, choose, kinds_of
from silodp.server.algorithms import find
from silodp.server.approval import STEPS, approves, disagreement
from silodp.server.federation import Federation
from silodp.server.folder import open_run, silo_rows
from silodp.server.journal import Journal
from silodp.server.loop import Run
from silodp.server.order import TOTALS, Order, by_silo
from silodp.server.prepare import Prepared, least_of, prepare
from silodp.server.progress import Progress as Record
from silodp.server.quote import RunHolds
from silodp.server.remote import Card, Carrier, Remote, Timeouts
from silodp.server.remote_masked import MaskedRemote
from silodp.server.remote_shuffled import ShuffledRemote, Shuffler
from silodp.server.settings import participation_by_name, samplings_by_name
from silodp.server.shuffled import ShuffledFederation
from silodp.server.spending import Progress, Spending


def agree(cards: Sequence[Card], problem: Problem, trust: str = "isrl") -> None:
    """Raise BadInput unless all cards are about this very problem: model, loss, prox, features in
    one order, classes and torch version.
    """
    if not cards:
        raise BadInput("there is no silo; give the card (silo.json) of each")
    wanted = hashlib.sha256(problem.definition().encode()).hexdigest()
    for card in cards:
        for field in (
            "model",
            "prox",
            "feature_map",
            "schema",
            "features",
            "classes",
            "definition",
        ):
            # A file is compared by its hash, in the definition. Its path may differ.
            file = field in ("model", "feature_map") and ".py:" in getattr(card, field)
            if getattr(card, field) != getattr(cards[0], field) and not file:
                raise BadInput(
                    f"silo {card.name} has another {field} than silo {cards[0].name}; all "
                    "must approve one and the same problem, and "
                    f"{disagreement(cards)}"
                )
        if card.definition != wanted:
            raise BadInput(
                f"silo {card.name} approves {approves(card)} by its definition, and this "
                "run is about another one: its model, prox, loss, schema or "
                f"torch version (here {torch.__version__}) differs. Train what is "
                f"approved, or {STEPS}"
            )
    agree_on_rule(cards, trust)


def plan_order(order: Order, cards: Sequence[Card]) -> Prepared:
    """Return the order ready to run over these silos.

    Each silo's budget is its own, or the one of the order, which must not be larger. Raise BadInput
    if the order cannot be run at these silos.
    """
    names = [card.name for card in cards]
    counts = [card.records for card in cards]
    if order.user_level or order.delta or order.rule not in (None, "gdp"):
        raise BadInput(
            "over a network delta, rule and unit are those of the silos' own ledgers; "
            "leave out --delta, --rule and --user-level"
        )
    samplings = samplings_by_name(order.sampling, find(order.algorithm), order.rounds)
    if any(sampling.sampled for sampling in samplings.values()):
        raise BadInput(
            f"sampling {order.sampling!r} has no price under the rule gdp; use full or disjoint"
        )
    if order.totals:
        participation = participation_by_name(order.participation, len(cards), order.coins)()
        # A total of one silo would be that silo's own answer.
        least_of(order, participation, fewest=2)
    if order.totals:
        most = max(card.colluding for card in cards)
        if order.colluding < most:
            raise BadInput(
                f"colluding is {order.colluding}, but a silo's policy requires a price against "
                f"{most}; use --colluding {most}"
            )
    return prepare(
        order, names, counts, budgets=budgets_over(order, cards), dimension=cards[0].parameters
    )


def budgets_over(order: Order, cards: Sequence[Card]) -> list[Budget]:
    """Return each silo's budget for the run: its own, or the one of the order.

    Raise BadInput if the order's epsilon is larger than the silo's own.
    """
    epsilons = by_silo("epsilon", order.epsilon, [card.name for card in cards])
    budgets = []
    for card in cards:
        epsilon = epsilons[card.name]
        if epsilon is None:
            epsilon = card.epsilon
        elif not 0 < epsilon <= card.epsilon:
            raise BadInput(
                f"epsilon is {epsilon:g}, but silo {card.name} has {card.epsilon:g} in "
                "all; use at most that, and above 0"
            )
        budgets.append(Budget(epsilon, card.delta))
    return budgets


def advised(order: Order, cards: Sequence[Card]) -> Advice:
    """Return the advisor's choices for everything that the order leaves open, from the silos'
    cards. The model is the one that the silos approve.
    """
    card = cards[0]
    names = tuple(c.name for c in cards)
    if card.schema:
        task = Schema.parse(card.schema, f"the card of {card.name}")
    else:
        task = Task.plain(len(card.classes))
    counts = tuple(c.records - c.held_out for c in cards)
    # A card without a list of statistics allows all of them.
    lists = [set(c.statistics) for c in cards if c.statistics]
    if lists:
        allowed = tuple(sorted(set.intersection(*lists)))
    else:
        allowed = None
    facts = Facts(
        names,
        counts,
        kinds_of(task, len(card.features)),
        task,
        tuple(budgets_over(order, cards)),
        statistics=allowed,
    )
    advice = choose(replace(order, model=order.model or card.model), facts)
    return replace(advice, order=replace(advice.order, model=order.model))


def agree_on_rule(cards: Sequence[Card], trust: str) -> None:
    """Raise BadInput unless every silo keeps its ledger by the rule that runs are priced by, and
    answers under this trust.
    """
    if trust not in ("isrl", *TOTALS):
        raise BadInput(f"trust {trust!r} is unknown over a network; choose isrl, masks or shuffle")
    for card in cards:
        if card.rule != "gdp":
            raise BadInput(
                f"silo {card.name} keeps its ledger by the rule {card.rule}; a run is planned for "
                "gdp, at every silo"
            )
        if trust in TOTALS and card.trust != trust:
            raise BadInput(
                f"silo {card.name} has a policy for {card.trust}, and the run is for {trust}; use "
                f"silos that were made for {trust}"
            )


class NetworkRun(Run):
    """One run over a network, new or resumed."""

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
        run: str | None = None,
        holds: Callable[..., RunHolds] = RunHolds,
        held: Callable[[Mapping[str, HoldReply]], None] = lambda held: None,
        advice: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the run in `folder`, or create it.

        Arguments:

        - `cards`, `problem`, `order`: the silos, what they approve, and what to train.
        - `carrier`: takes frames to the silos.
        - `folder`: the run's folder.
        - `key`: the key of the asker, which each silo's policy lists.
        - `quorum` (default 1): fewest silos that must answer a question.
        - `timeouts`: waiting times. The default is estimated from the model's size, and then from
          the first answers.
        - `shuffler`: the way to the shuffler, with trust shuffle only.
        - `run`: the id of a new run, on which peers have agreed. The default is a random id.
        - `holds`: creates the holds at the gates.
        - `held`: called with the hold of each silo, before the first question goes out.
        - `advice`: the advice that the order follows, for run.json.

        Raise BadInput if the folder has a run with another order, other silos or another key.
        """
        agree(cards, problem, order.trust)
        if (order.trust == "shuffle") != bool(shuffler):
            if shuffler:
                given = "given"
            else:
                given = "not given"
            raise BadInput(
                f"the trust is {order.trust}, and a shuffler's card is {given}; the two belong "
                "together"
            )
        prepared = plan_order(order, cards)
        was_there = folder.exists()
        self._cards = tuple(cards)
        silos = silo_rows(
            [card.name for card in cards], [card.records for card in cards], prepared.budgets
        )
        asker = key.public_key().public_bytes_raw().hex()
        description = {
            "kind": "federation",
            "order": order.words(),
            "silos": silos,
            "asker": asker,
            "cards": [
                {k: v for k, v in dataclasses.asdict(c).items() if k not in ("checked", "study")}
                for c in cards
            ],
        }
        partitioned = any(
            isinstance(asked.event.sampling, DisjointBatches) for asked in prepared.plan.asked
        )
        facts_of_start = {
            "advice": advice,
            "study": cards[0].study,
            "checked": {card.name: card.checked for card in cards},
            "partitioned": partitioned,
        }
        self.run, config = _open_folder(folder, description, run, facts_of_start)
        with contextlib.ExitStack() as undo:
            self._journal = Journal(RunFolder(folder).journal, self.run, config)
            undo.callback(self._journal.close)
            if self._journal.new:
                # A new run that is refused leaves no folder.
                undo.callback(_discard, folder, was_there)
            self._spending = Spending(cards, prepared.plan, Record(folder, keep=True))
            undo.callback(self._spending.record.close)
            if order.totals:
                quorum = prepared.least
            releases = max(asked.event.count for asked in prepared.plan.asked)
            size = {
                "parameters": problem.dim,
                "records": max(card.records for card in cards),
                "releases": releases,
            }
            asking = {
                "run": self.run,
                "key": key,
                "timeouts": timeouts or Timeouts.estimated(**size),
                "quorum": quorum,
            }
            self._holds = holds(cards, carrier, prepared.plan, **asking, report=held)
            more: dict[str, Any] = asking | {
                "journal": self._journal,
                "report": self._spending.note,
                "before": self._going_out,
            }
            if shuffler:
                self._remote: Remote = ShuffledRemote(cards, carrier, shuffler=shuffler, **more)
            elif order.trust == "masks":
                self._remote = MaskedRemote(cards, carrier, **more)
            else:
                self._remote = Remote(cards, carrier, **more)
            undo.pop_all()
        super().__init__(
            prepared,
            problem,
            folder,
            order.coins,
            connect=self._connected,
            journal=_NetworkJournal(
                self._journal, self._remote, self._spending, self._holds, folder, was_there
            ),
            reporter=_NetworkReporter(
                self._cards, prepared.order, self._remote, self._spending, self.run, partitioned
            ),
        )

    def _connected(self) -> Federation:
        """Return the federation that the algorithm asks."""
        weights = self.made.weights(
            [card.records for card in self._cards], [card.held_out for card in self._cards]
        )
        if self.made.order.totals:
            return ShuffledFederation(self._remote, self.made.participation(), weights)
        return Federation(self._remote, self.made.participation(), weights)

    def _going_out(self, charges: Sequence[tuple[Event | TotalEvent, tuple[str, ...]]]) -> None:
        """Prepare for a question that goes out: renew the holds, and write what its charges would
        be.
        """
        self._holds.keep()
        self._spending.ahead(self._remote.asked, charges)
        # An earlier stop wrote a result. The resumed run spends more than that result shows.
        self.files.result.unlink(missing_ok=True)


class _NetworkJournal:
    """The journal of a run over a network. It releases the run's holds at the end."""

    def __init__(
        self,
        journal: Journal,
        remote: Remote,
        spending: Spending,
        holds: RunHolds,
        folder: Path,
        was_there: bool,
    ) -> None:
        """Store the arguments. `was_there` is true if the folder is older than the run."""
        self._journal = journal
        self._remote = remote
        self._spending = spending
        self._holds = holds
        self._folder = folder
        self._was_there = was_there
        self._since = 0
        """The first question after the last iterate."""

    def iterate(self, number: int, w: Tensor) -> None:
        """Write the iterate's hash."""
        digest = hashlib.sha256(w.contiguous().cpu().numpy().data).hexdigest()
        self._journal.iterate(number, digest)
        self._since = self._remote.asked

    def stop(self, reason: str) -> None:
        """Count every question that may have been charged, and mark where the run stopped."""
        lost = list(self._remote.lost)
        if self._remote.pending:
            lost.append(self._remote.pending)
        for event, names in lost:
            self._spending.charge(event, names)
        self._spending.ahead(self._remote.asked, ())
        self._journal.stop(self._since)

    def refuse(self) -> None:
        """Remove the files of a new run unless a question has gone out."""
        gone_out = self._remote.asked or self._remote.pending or self._remote.lost
        if self._journal.new and not gone_out:
            _discard(self._folder, self._was_there)

    def close(self) -> None:
        """Release the holds, and close the files."""
        self._holds.release()
        self._journal.close()
        self._spending.record.close()


class _NetworkReporter:
    """The report of a run over a network, from the counts of its spending."""

    def __init__(
        self,
        cards: Sequence[Card],
        order: Order,
        remote: Remote,
        spending: Spending,
        run: str,
        partitioned: bool,
    ) -> None:
        """Store the arguments. `partitioned` is true if each record is in one batch only."""
        self._card = cards[0]
        self._order = order
        self._remote = remote
        self._spending = spending
        self._run = run
        self._partitioned = partitioned

    def progress(self, iterates: int) -> Progress:
        """Return what each silo has answered and spent."""
        return self._spending.progress(iterates)

    def model(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return the description of the model in the silos' cards."""
        card = self._card
        words = facts(
            model=self._order.model or card.model,
            prox=card.prox,
            loss=self._order.loss,
            feature_map=self._order.feature_map or card.feature_map,
        )
        if card.schema:
            return words | {"schema": card.schema}, {}
        return words | {"plain": plain_text(card.features, card.classes, "label")}, {}

    def result(self, w: Tensor, iterates: int, ended: str) -> dict[str, Any]:
        """Return how the run ended, and what each silo answered and spent."""
        return {
            "run": self._run,
            "ended": ended,
            "iterates": iterates,
            "questions": self._spending.questions,
            "silos": self._spending.silos(self._remote.retired),
            "partitioned": self._partitioned,
        }

    def without_model(self) -> str:
        """Return what each silo has spent at most."""
        spent = ", ".join(
            f"{name} epsilon {rounded_up(value, 4)}"
            for name, value in self._spending.spent().items()
        )
        return f"; spent at most: {spent}; it can be resumed"


def _discard(folder: Path, kept: bool) -> None:
    """Delete what a new run wrote before its first question. Delete the folder too, unless
    `kept`.
    """
    files = RunFolder(folder)
    for path in (files.journal, files.replies, files.progress, files.description):
        path.unlink(missing_ok=True)
    if not kept:
        # A folder with files of others cannot be removed, and stays.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _open_folder(
    folder: Path, wanted: dict[str, Any], run: str | None, facts_of_start: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the run's id and the hash of its configuration.

    A new folder gets a new id, and stores `facts_of_start`. Raise BadInput if the folder has
    another run, or cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = {"run": run or secrets.token_hex(16), **facts_of_start}
        description = open_run(
            folder, wanted, own=own, advice="choose another folder, or resume that run as it is"
        )
        if run and description["run"] != run:
            raise BadInput(
                f"the run in {folder} has the id {description['run']}, not {run}; choose another "
                "folder, or resume that run as it is"
            )
        config = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
        return str(description["run"]), config
    except (OSError, KeyError) as error:
        raise BadInput(
            f"the run folder {folder} cannot be used ({type(error).__name__}); choose another"
        ) from None
