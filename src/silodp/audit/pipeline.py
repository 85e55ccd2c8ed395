"""The pipeline under attack, as a description of its parts. A mutant is the same description with
one part exchanged.

This module also has what every probe needs: keys, a deployed silo, a gate without door or ledger,
and stand-ins for a ledger and an answerer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor, nn

from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import GDP, Budget, Rule
from silodp.core.problem.losses import squared_error
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import Answer, Envelope, decode_reply, encode_query
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.server.plan import Plan, calibrate
from silodp.server.shuffled import in_totals
from silodp.shuffler.pool import Pool
from silodp.shuffler.store import RoundStore
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.data.tables import KnownBy, Table, table_of
from silodp.silo.gate import Gate
from silodp.silo.ledger.durable import DurableLedger, Identity
from silodp.silo.ledger.memory import MemoryLedger
from silodp.silo.service import door as door_module
from silodp.silo.service.door import Door, definition_hash
from silodp.silo.service.masking import Masker, Masking
from silodp.silo.service.policy import Policy, Shuffling
from silodp.silo.service.sealing import Sealer
from silodp.silo.service.trust import Trust
from silodp.wire.inprocess import ThroughShuffler


@dataclass(frozen=True)
class Pipeline:
    """The shipped parts, in simulation and in deployment."""

    answerer: Callable[..., Any] = Simulated
    gate: Callable[..., Any] = Gate
    ledger: Callable[..., Any] = MemoryLedger
    calibrate: Callable[..., Plan] = calibrate
    exact: Any = Exact
    door: Any = Door
    reopen: Callable[..., DurableLedger] = DurableLedger.open

    in_totals: Callable[..., Plan] = in_totals
    channel: Any = ThroughShuffler
    pool: Any = Pool
    store: Any = RoundStore
    masker: Any = Masker
    table: Callable[..., Table] = table_of
    pricing: Callable[[], AbstractContextManager] = nullcontext
    """The context of a probe of prices. Only a mutant changes something in it."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant these parts where the door looks for the shipped ones."""
        with mock.patch.multiple(door_module, Exact=self.exact, Gate=self.gate):
            yield

    def simulated(
        self, problem: Problem, records: Records, plan: Plan, seeds: Sequence[int]
    ) -> tuple[Any, Any]:
        """Return (gate, answerer) of a simulation that charges by this plan."""
        answerer = self.answerer(problem, records, seeds)
        ledger = self.ledger(plan.rule, plan.budgets.tolist(), records.counts)
        gate = self.gate(answerer, ledger, dim=problem.dim, counts=records.counts, runs=len(seeds))
        return gate, answerer

    def open_gate(self, problem: Problem, records: Records, **more: Any) -> Any:
        """Return the gate of a deployed silo with its arithmetic, without a door before it or a
        ledger behind it.
        """
        n = records.counts[0]
        in_order = {"partition": lambda name, batches: np.arange(n)}
        exact = self.exact(problem, records, **in_order | more)
        return self.gate(exact, Free(), dim=problem.dim, counts=[n])


SOUND = Pipeline()
DIM = 3
BUDGET = Budget(6.0, 1e-5)


class Caught(Exception):
    """A probe has found a mistake in the pipeline. The message describes it."""


Probe = Callable[[Pipeline, int, Path], None]
"""A function of a pipeline, a seed and an empty folder. It raises Caught with one sentence if it
finds a mistake.
"""


class Probes(dict[str, Probe]):
    """Probes by name, and the parts of a pipeline that they test."""

    def __init__(self, *parts: str) -> None:
        self.parts = set(parts)

    def probe(self, name: str) -> Callable[[Probe], Probe]:
        """Return a decorator that adds a probe under this name."""
        return lambda probe: self.setdefault(name, probe)


# --- stand-ins -----------------------------------------------------------------------------------


class Free:
    """A ledger that allows every charge."""

    def charge(self, event: object, silos: object) -> None:
        """Allow the charge."""
        pass


class Blank:
    """An answerer without records, which notes whether it was asked."""

    features = 0
    asked = False

    def answer(self, query: Query, silos: object) -> Tensor:
        """Note the question, and return zero."""
        self.asked = True
        return torch.zeros(query.statistic.shape)[:, None]


def signing(name: str) -> Ed25519PrivateKey:
    """Return a signing key of the audit, the same in every run."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def sealing(name: str) -> X25519PrivateKey:
    """Return a sealing key of the audit, the same in every run."""
    return X25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public(key: Ed25519PrivateKey | X25519PrivateKey) -> str:
    """Return the public key in hexadecimal."""
    return key.public_key().public_bytes_raw().hex()


# --- a deployed silo -----------------------------------------------------------------------------


class Silo:
    """A deployed silo in a folder of its own: policy, durable ledger and door. Its questions are
    signed by the one key that may ask.
    """

    rule: Rule = GDP()
    budget = BUDGET
    statistics: tuple[str, ...] = ("Grad",)
    samplings: tuple[str, ...] = ("FullBatch",)
    held_out = 0.0
    shuffling: tuple[Shuffling, Ed25519PrivateKey] | None = None
    masking: Masking | None = None
    raw: KnownBy | None = None
    """The raw cells by which the ledger recognises the records of a file. None without a file."""

    def __init__(self, folder: Path, pipeline: Pipeline, *, target: float = 0.25) -> None:
        """Make a silo of twelve records, of which the first has this target. Two silos with
        different targets are neighbours.
        """
        x = torch.linspace(-1, 1, 12 * DIM).reshape(1, 12, DIM)
        y = torch.linspace(0.1, 1.2, 12)[None].clone()
        y[0, 0] = target
        self.set_up(
            folder,
            pipeline,
            Problem(nn.Linear(DIM, 1, bias=False), squared_error),
            Records(x, y, (12,), ("silo",)),
        )

    def set_up(self, folder: Path, pipeline: Pipeline, problem: Problem, records: Records) -> None:
        """Make policy and ledger for these records, and open the door."""
        folder.mkdir(parents=True)
        self.pipeline = pipeline
        self._folder = folder
        self.problem = problem
        self.records = records
        self._key = signing("the audit's own server")
        self.policy = Policy(
            silo="silo",
            epsilon=self.budget.epsilon,
            delta=self.budget.delta,
            definition=definition_hash(problem),
            statistics=self.statistics,
            samplings=self.samplings,
            clip=(1e-6, 1e6),
            minimum_noise_multiplier=1e-9,
            minimum_batch=1,
            maximum_local_steps=10,
            queries_per_run=1000,
            queries_per_hour=1000,
            expires=date(9999, 1, 1),
            askers=(public(self._key),),
        )
        identity = Identity.of(*(self.raw or records.known_by))
        DurableLedger.create(
            self.path,
            rule=self.rule,
            budget=self.budget,
            records=records.counts[0],
            identity=identity,
            registry=self.registry,
        )
        self.restart()

    @property
    def path(self) -> Path:
        """Return the path of the ledger."""
        return self._folder / "ledger.sqlite"

    @property
    def registry(self) -> Path:
        """Return the folder of the registry of ledgers."""
        return self._folder / "registry"

    def restart(self) -> None:
        """Open the silo as a new process does: everything that was only in memory is gone."""
        with self.pipeline.planted():
            self.ledger = self.pipeline.reopen(self.path)
            key = signing("the audit's own silo")
            self.trust: Trust | None = None
            if self.masking:
                self.trust = self.pipeline.masker(self.masking, key, self.policy.definition)
            elif self.shuffling:
                self.trust = Sealer(*self.shuffling)
            more: dict[str, Any] = {
                "registry": self.registry,
                "trust": self.trust,
                "held_out": self.held_out,
                "known_by": self.raw,
            }
            self.door = self.pipeline.door(
                self.policy, self.problem, self.records, self.ledger, **more
            )

    def envelope(self, query_id: str, query: Query, round: str = "0") -> Envelope:
        """Return the envelope of a question to this silo."""
        return Envelope(self.policy.silo, "audit", query_id, self.policy.definition, query, round)

    def frame(self, query_id: str, query: Query, round: str = "0") -> bytes:
        """Return the signed frame of a question to this silo."""
        return encode_query(self.envelope(query_id, query, round), self._key)

    def handle(self, frame: bytes) -> bytes:
        """Return the door's reply to a frame."""
        with self.pipeline.planted():
            return self.door.handle(frame)

    def ask(self, query_id: str, query: Query) -> Answer:
        """Return the answer to a question. Raise AssertionError if the gate refuses."""
        reply = decode_reply(self.handle(self.frame(query_id, query)), limit=2**20)
        assert isinstance(reply, Answer), f"the gate refused ({getattr(reply, 'code', reply)})"
        return reply


def question(noise_multiplier: float = 4.0, clip: float = 1.0, point: float = 0.5) -> Query:
    """Return a question about the gradient at a constant point."""
    return Query(Grad(torch.full((1, DIM), point)), Gaussian("audit", clip, noise_multiplier))
