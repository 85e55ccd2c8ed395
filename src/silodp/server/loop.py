"""The one run loop: in simulation, over a network and among peers a run is iterated, ended and
written by the same lines.

It takes three collaborators: the federation that it asks, the journal by which it can be resumed,
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
from silodp.server.estimates.moments import Keeping
from silodp.server.federation import Federation, StopRun
from silodp.server.folder import write_model
from silodp.server.kept import Kept
from silodp.server.output import output
from silodp.server.plan import DryRun, PlanLimits
from silodp.server.prepare import AGAINST, Prepared


class RunJournal(Protocol):
    """Keep what a run needs to be resumed, and close what it has opened."""

    def iterate(self, number: int, w: Tensor) -> None:
        """Record that the iterate is there."""

    def stop(self, reason: str) -> None:
        """Record that the run has ended early. Raise BadInput if such a run has no result."""

    def refuse(self) -> None:
        """Remove what a run left that was refused before its first question."""

    def close(self) -> None:
        """Ask nothing more, whatever has happened."""


class Reporter(Protocol):
    """Report how far a run is, and what came out."""

    def progress(self, iterates: int) -> Any:
        """Return what is known after this many iterates."""

    def model(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return the words of which the model was made, and the tensors beside its parameters."""
        ...

    def result(self, w: Tensor, iterates: int, ended: str) -> dict[str, Any]:
        """Return what the summary of a run contains that hands over `w`.

        Every other file of the run is written here.
        """
        ...

    def without_model(self) -> str:
        """Return the end of a sentence about a run without an iterate."""
        ...


class Run:
    """One run of a prepared order: iterate over it for progress, then `summary` says how it
    ended.
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
        """Store the arguments. `connect` is called once, when the run begins, and returns the
        federation that the algorithm asks.

        The public `coin` decides where the run starts, and which iterate it hands over where that
        is drawn.
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

    def __iter__(self) -> Iterator[Any]:
        """Runs to the end, clean or early; BadInput if it ends before the first iterate. Afterwards
        the folder has model and summary.
        """
        start = self.problem.initial([self._coin])
        if self.made.order.output == "last":
            kept = deque[Tensor](maxlen=1)
        else:
            kept = Kept(self.folder)
        fed: Keeping | None = None
        try:
            if is_file(self.made.algorithm.name):
                self._rehearse(start)
            asked = self._connect()
            asked.check = PlanLimits(self.made.plan)
            fed = Keeping(asked)
            for w in self.made.run(fed, self.problem, start, **self.made.mechanisms):
                if not bool(torch.isfinite(w).all()):
                    raise StopRun(
                        f"training diverged with step {self.made.order.step:g}; use a "
                        "smaller --step"
                    )
                kept.append(w)
                self.iterates += 1
                self._run_journal.iterate(self.iterates, w)
                yield self._reporter.progress(self.iterates)
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
        assert fed is not None  # there are iterates
        fed.write(self.folder)
        self._write(output(kept, self.made.order.output, seed=self._coin))

    def _rehearse(self, start: Tensor) -> None:
        """The way to the first iterate with answers of zero, at the model's size: what is wrong
        with it is said before anybody is asked.
        """
        who = self.made.participation()
        for _ in self.made.run(
            DryRun(who, who.silos, []), self.problem, start, **self.made.mechanisms
        ):
            break

    def _write(self, w: Tensor) -> None:
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
        } | self._reporter.result(w, self.iterates, self.ended)
        atomic.write_json(self.files.result, self.summary)
