"""The one run loop. The same code iterates, ends and writes a run in simulation, over a network and
among peers.

It has three collaborators: the federation that it asks, the journal that makes the run resumable,
and the reporter of its progress and its result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.extension import is_file
from silodp.core.problem.person import unit
from silodp.core.problem.problem import Problem
from silodp.host import atomic
from silodp.runs import RunFolder
from silodp.server.estimates import recalibration
from silodp.server.estimates.moments import Keeping
from silodp.server.estimates.spread import NoiseRecord, noise_spread
from silodp.server.federation import Federation, StopRun
from silodp.server.folder import write_model
from silodp.server.kept import Kept
from silodp.server.output import output
from silodp.server.plan import DryRun, PlanLimits
from silodp.server.prepare import AGAINST, Prepared


class RunJournal(Protocol):
    """The record that a run needs to be resumed. It closes what the run has opened."""

    def iterate(self, number: int, w: Tensor) -> None:
        """Record that the iterate exists."""

    def stop(self, reason: str) -> None:
        """Record that the run has ended early. Raise BadInput if such a run has no result."""

    def refuse(self) -> None:
        """Remove what a run left that was refused before its first question."""

    def close(self) -> None:
        """Release and close everything. No question follows."""


class Reporter(Protocol):
    """The report of a run's progress and of its result."""

    def progress(self, iterates: int) -> Any:
        """Return the progress after this many iterates."""

    def model(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return the words that describe the model, and the tensors that are stored beside its
        parameters.
        """
        ...

    def result(self, w: Tensor, iterates: int, ended: str) -> dict[str, Any]:
        """Return what the summary of a run with the result `w` contains.

        Write every other file of the run.
        """
        ...

    def without_model(self) -> str:
        """Return the end of a sentence about a run without an iterate."""
        ...


class Run:
    """One run of a prepared order. Iterate over it for progress. Afterwards `summary` describes its
    end.
    """

    def __init__(
        self,
        made: Prepared,
        problem: Problem,
        folder: Path,
        coin: int,
        *,
        connect: Callable[[], Federation],
        journal: RunJournal,
        reporter: Reporter,
    ) -> None:
        """Store the arguments.

        `connect` is called once, when the run begins. It returns the federation that the algorithm
        asks. The public `coin` decides where the run starts. It also decides which iterate is
        returned, if the output rule draws one.
        """
        self.made = made
        self.problem = problem
        self.folder = folder
        self.files = RunFolder(folder)
        self._coin = coin
        self._connect = connect
        self._run_journal = journal
        self._reporter = reporter
        self.iterates = 0
        self.ended = "finished"
        if "rounds" in made.settings:
            self.total = made.order.rounds
        else:
            self.total = sum(asked.kind in made.algorithm.kinds for asked in made.plan.asked)
        self.summary: dict[str, Any] = {}
        self._recalibrated: Tensor | None = None
        self._words: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        """Run to the end, complete or early, and yield the progress after each iterate.

        Afterwards the folder has the model and the summary. Raise BadInput if the run ends before
        its first iterate.
        """
        if self.made.recalibration is not None:
            recalibration.check(self.problem)
        start = self.problem.initial([self._coin])
        if self.made.order.output == "last":
            kept = deque[Tensor](maxlen=1)
        else:
            kept = Kept(self.folder)
        fed: Keeping | None = None
        record = NoiseRecord()
        try:
            if is_file(self.made.algorithm.name):
                self._rehearse(start)
            federation = self._connect()
            federation.check = PlanLimits(self.made.plan)
            federation.record = record
            fed = Keeping(federation)
            for w in self.made.run(fed, self.problem, start, **self.made.mechanisms):
                if not bool(torch.isfinite(w).all()):
                    raise StopRun(
                        f"training diverged with step {self.made.order.step:g}; use a "
                        "smaller --step"
                    )
                # The journal records an iterate before the progress shows it.
                kept.append(w)
                self.iterates += 1
                self._run_journal.iterate(self.iterates, w)
                yield self._reporter.progress(self.iterates)
            federation.record = None
            if len(kept):
                self._recalibrate(federation, self._output(kept))
        except StopRun as stop:
            self.ended = str(stop)
            self._run_journal.stop(self.ended)
        except BadInput:
            self._run_journal.refuse()
            raise
        finally:
            self._run_journal.close()
        if not len(kept):
            without = self._reporter.without_model()
            raise BadInput(f"the run ended before its first iterate: {self.ended}{without}")
        assert fed is not None, "iterates come from a federation"
        fed.write(self.folder)
        self._words["spread"] = noise_spread(self.made, self.problem, record, seed=self._coin)
        self._write(self._output(kept) if self._recalibrated is None else self._recalibrated)

    def _output(self, kept: deque[Tensor] | Kept) -> Tensor:
        return output(kept, self.made.order.output, seed=self._coin)

    def _recalibrate(self, fed: Federation, w: Tensor) -> None:
        """Ask the question that makes the model's risks right, where the order buys it."""
        noise = self.made.recalibration
        if noise is None:
            return
        made, found = recalibration.recalibrated(fed, self.problem, w, noise)
        # The journal has the answer, so the replies that it was made of can go.
        self._run_journal.iterate(self.iterates + 1, w)
        self._recalibrated = made.to(w)
        self._words["recalibration"] = {
            "share": self.made.order.recalibration,
            "intercept": found.intercept,
            "slope": found.slope,
            "logits": [round(logit, 4) for logit in found.logits],
            "shares": [round(share, 6) for share in found.shares],
        }

    def _rehearse(self, start: Tensor) -> None:
        """Run to the first iterate with answers of zero, at the model's size.

        Any error of the user's algorithm is reported here, before a silo is asked.
        """
        participation = self.made.participation()
        dry_run = DryRun(participation, participation.silos, [])
        for _ in self.made.run(dry_run, self.problem, start, **self.made.mechanisms):
            break

    def _write(self, w: Tensor) -> None:
        """Write the model and the summary."""
        order = self.made.order
        about, tensors = self._reporter.model()
        path = write_model(
            self.folder, self.problem, w, {"algorithm": order.algorithm} | about, tensors
        )
        self.summary = {
            "algorithm": order.algorithm,
            "parameters": self.problem.dim,
            "trust": order.trust,
            "said": AGAINST[order.trust],
            "unit": unit(self.problem.person),
            "model": str(path),
            **self._words,
        } | self._reporter.result(w, self.iterates, self.ended)
        atomic.write_json(self.files.result, self.summary)
