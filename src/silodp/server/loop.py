"""The one run loop: in simulation, over a network and among peers a run is iterated, ended and
written by the same lines.

Whom it asks, and what it keeps beside the model (a transcript, a journal), is for a subclass to
say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from silodp.server.plan import DryRun, Within
from silodp.server.prepare import AGAINST, Prepared


class Run:
    """One run of a prepared order: iterate over it for progress, then `summary` says how it
    ended.
    """

    def __init__(self, made: Prepared, problem: Problem, folder: Path, coin: int) -> None:
        """The public `coin` says where the run starts, and which iterate it hands over where that
        is drawn.
        """
        self.made, self.problem, self.folder, self._coin = made, problem, folder, coin
        self.files = RunFolder(folder)
        self.iterates, self.ended = 0, "finished"
        self.total = (
            made.order.rounds
            if "rounds" in made.settings
            else sum(a.kind in made.algorithm.kinds for a in made.plan.asked)
        )
        self.summary: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        """Runs to the end, clean or early; BadInput if it ends before the first iterate. Afterwards
        the folder has model and summary.
        """
        start = self.problem.initial([self._coin])
        kept = deque[Tensor](maxlen=1) if self.made.order.output == "last" else Kept(self.folder)
        fed: Keeping | None = None
        try:
            if is_file(self.made.algorithm.name):
                self._rehearse(start)
            asked = self._federation()
            asked.check = Within(self.made.plan)
            fed = Keeping(asked)
            for w in self.made.run(fed, self.problem, start, **self.made.mechanisms):
                if not bool(torch.isfinite(w).all()):
                    raise StopRun(
                        f"training diverged with step {self.made.order.step:g}; use a "
                        "smaller --step"
                    )
                kept.append(w)
                self.iterates += 1
                self._made(w)
                yield self._told()
        except StopRun as stop:
            self.ended = str(stop)
            self._stopped()
        except BadInput:
            self._refused()
            raise
        finally:
            self._close()
        if not len(kept):
            raise BadInput(
                f"the run ended before its first iterate: {self.ended}{self._without_model()}"
            )
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
        about, tensors = self._about()
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
        } | self._found(w)
        atomic.write_json(self.files.result, self.summary)

    # --- for a subclass to say -------------------------------------------------------------------

    def _federation(self) -> Federation:
        """Whom the algorithm asks."""
        raise NotImplementedError

    def _about(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """In what words the model was made, and what its file holds beside its parameters."""
        raise NotImplementedError

    def _found(self, w: Tensor) -> dict[str, Any]:
        """What else the summary says of a run that hands over w; every other file of the run is
        written here.
        """
        raise NotImplementedError

    def _made(self, w: Tensor) -> None:
        """An iterate is there."""

    def _told(self) -> Any:
        """What is known after each iterate."""
        return self.iterates

    def _stopped(self) -> None:
        """The run has ended early."""

    def _refused(self) -> None:
        """The run is refused."""

    def _close(self) -> None:
        """Whatever has happened, nothing more is asked."""

    def _without_model(self) -> str:
        """What a run that has no iterate leaves."""
        return ""
