"""`silodp tune --silo`: tuning on the silos' own records, where every look costs budget.

An untrusted server sees the releases of every candidate, chosen or not. So the price is their
composition: each of C candidates gets 1/C of the budget (mu^2). A random number of runs does not
change that. A trusted curator with all records may instead keep every run except the best secret,
and pay for a selection (`core.privacy.tuning`). The runs that were not chosen are then deleted, and
their number too.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget, gdp_epsilon_exactly, gdp_mu
from silodp.core.privacy.tuning import (
    GaussianRun,
    Repetitions,
    draw,
    repetitions_by_name,
    selected_epsilon,
    selected_mu,
)
from silodp.core.problem.problem import Problem
from silodp.core.query import Query
from silodp.core.statistics import Moments
from silodp.core.weights import Weights
from silodp.host import atomic
from silodp.runs import RunFolder
from silodp.server.estimates.scaling import learn_scaling
from silodp.server.federation import Everyone, Federation, Port
from silodp.server.order import Order, targets, with_default_delta
from silodp.server.output import output
from silodp.server.plan import Plan
from silodp.server.prepare import SCALING_SHARE
from silodp.server.several import of_order, plan_several, ready
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect
from silodp.simulation.hidden import clean_up, hidden_of, open_hidden, renew, seed_of
from silodp.simulation.planning import warn_of_delta
from silodp.simulation.runfolder import open_folder, refuse_runs, seeded, write_environment
from silodp.simulation.sweep import Tick, unseen
from silodp.simulation.tune import Ranges, code_of, finish, problem_of, row_of


def candidates_of(ranges: Ranges, order: Order, count: int) -> list[Order]:
    """Return `count` of all combinations, drawn by a public coin, in the order of the draw.

    Raise BadInput if there are fewer combinations.
    """
    combinations = itertools.product(
        ranges.orders(replace(order, sampling="full")), ranges.steps, ranges.clips
    )
    every = [replace(one, step=step, clip=clip) for one, step, clip in combinations]
    if not 1 <= count <= len(every):
        raise BadInput(
            f"candidates is {count}; choose between 1 and {len(every)}, the number of combinations"
        )
    return [every[i] for i in np.random.default_rng(order.coins).permutation(len(every))[:count]]


# Runs are compared by the share of records whose class is predicted wrongly, as a mean over silos.
# A smaller share is better. A silo's gate releases it and charges for it like any other answer,
# through the Moments statistic of one feature in [0, 1]. Moments also releases the square, at the
# price of a factor of sqrt(2) in noise.


def wrong(problem: Problem, records: Records, w: Tensor) -> Records:
    """Return records with one feature: whether the class of the record is predicted wrongly.

    This runs at the silos. Each value is a function of the record and of the public w alone.
    """
    with torch.no_grad():
        scores = problem.outputs(w, records.x.flatten(0, 1))[0]
    labels = records.y.flatten()
    if scores.shape[-1] == 1:
        missed = (scores.squeeze(-1) > 0) != (labels > 0)
    else:
        missed = scores.argmax(-1) != labels
    missed = (missed | ~torch.isfinite(scores).all(-1)).float().reshape(*records.y.shape, 1)
    return Records(missed * records.mask.unsqueeze(-1), records.y, records.counts, records.names)


def ask_share(fed: Port, mechanism: Gaussian) -> float:
    """Ask for the released share of wrong predictions, and return it."""
    moments = Moments(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    return (float(fed.mean(Query(moments, mechanism.clipped(moments.norm)))[0, 0]) + 1) / 2


@dataclass(frozen=True)
class ChargedSearch:
    """A search on the silos' own records. It is written to config.json, and compared when a folder
    is continued.
    """

    order: Order
    """The common part of all candidates, and the budget of everything together."""
    ranges: Ranges
    silos: tuple[str, ...]
    classes: int
    candidates: int
    repetitions: str | None = None
    scale: bool = True
    counts: tuple[int, ...] = ()
    code: tuple[str, ...] = ()
    """SHA-256 of each FILE.py of the order. A folder is not continued with another file."""


def search_charged(
    search: ChargedSearch,
    records: Records,
    folder: Path,
    *,
    seed: int | None = None,
    tick: Tick = unseen,
) -> dict:
    """Try candidates on these records within the order's epsilon and delta in total. Return the
    best by its released score.

    The search continues where it was interrupted. The noise comes from a seed in the folder, so a
    repeated release is the same release. Raise BadInput for a search that cannot be run.
    """
    order = search.order
    central = search.order.trust == "central"
    if search.repetitions:
        repetitions = repetitions_by_name(search.repetitions)
    else:
        repetitions = None
    if order.totals:
        raise BadInput(
            f"a tuning cannot use trust {order.trust}; use isrl (the server sees every run) or "
            "central (a curator has the records)"
        )
    if central != (repetitions is not None):
        raise BadInput(
            "random stopping hides nothing from a server that sees every run; "
            "--repetitions belongs to --trust central, and is needed there"
        )
    if search.classes < 2:
        raise BadInput("the score is a share of wrong classes; give --classes, 2 or more of them")
    wanted = replace(search, counts=records.counts, code=code_of(order))
    budgets = targets(order, records.names, records.counts)
    large = with_default_delta(order, records.names, records.counts)
    if central:
        flat = records.mask.flatten()
        x = records.x.flatten(2).flatten(0, 1)[flat]
        y = records.y.flatten()[flat]
        records = Records.of([(x, y)], ["pool"])
        budgets = budgets[:1]
    else:
        records = Records(records.x.flatten(2), records.y, records.counts, records.names)
    problem = problem_of(order, records.x.shape[2:], search.classes)
    tried = candidates_of(search.ranges, order, search.candidates)
    trials = _Trials(search, problem, records, tried, budgets, repetitions)
    hidden = hidden_of(folder, central=central)
    # A curator's folder is only opened at the end, so it is checked here.
    if os.path.lexists(folder) and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise BadInput(f"{folder} is not a folder that can be written; choose another --out")
    if central and not RunFolder(folder).configuration.exists():
        refuse_runs(folder)
        open_folder(hidden, wanted)
    else:
        open_folder(folder, wanted)
    if RunFolder(folder).tuning.exists():
        # The search is finished, and another choice would cost budget again. The process may have
        # been killed before it deleted the secret files.
        clean_up(folder, hidden, central=central)
        return json.loads(RunFolder(folder).tuning.read_text())
    open_hidden(hidden)
    trials.hidden = hidden
    trials.seed = seed_of(hidden, seed, records)
    warn_of_delta(large)
    if repetitions is None:
        answer = trials.compose(tick)
    else:
        answer = trials.select(repetitions, tick)
    best = answer.pop("file")
    if central:
        renew(folder)
        open_folder(folder, wanted)
    if best is not None:
        content = load_file(best)
        scaling = {name: v for name, v in content.items() if name.startswith("scaling.")}
        parameters = problem.split(content["w"])
        tensors = {name: v[0].contiguous() for name, v in parameters.items()} | scaling
        atomic.write(RunFolder(folder).model, save(tensors), mode=0o644)
    write_environment(folder, noise=seeded(seed))
    finish(folder, answer, answer.pop("order"))
    clean_up(folder, hidden, central=central)
    return answer


class _Trials:
    """The runs of candidates, with one gate and one ledger for everything that one observer sees.

    The constructor plans everything that can be refused. So an error is reported before anything is
    written that a corrected command would find.
    """

    hidden: Path
    seed: int

    def __init__(
        self,
        search: ChargedSearch,
        problem: Problem,
        records: Records,
        tried: Sequence[Order],
        budgets: Sequence[Budget],
        repetitions: Repetitions | None,
    ) -> None:
        self.search = search
        self.problem = problem
        self.records = records
        self.tried = tried
        self.budgets = budgets
        if repetitions is None:
            self.plan = self._plan(tried, budgets, scaling=search.scale)
            return
        (budget,) = budgets
        if search.scale:
            self.beside = SCALING_SHARE * gdp_mu(budget) ** 2
        else:
            self.beside = 0.0
        self.mu = selected_mu(repetitions, budget, beside=self.beside)
        if self.beside:
            self.once = self._plan(
                [], [self._budget(math.sqrt(self.beside), budget.delta)], scaling=True
            )
        else:
            self.once = None
        each = self._budget(self.mu, budget.delta)
        self.each = [self._plan([candidate], [each], scaling=False) for candidate in tried]

    def compose(self, tick: Tick) -> dict:
        """Run every candidate within one budget, on one ledger, because the server sees them all.
        Return the answer.
        """
        plan = self.plan
        tried = self.tried
        ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), self.records.counts)
        if self.search.scale:
            records, scaling = self._scaled(plan, ledger)
        else:
            records = self.records
            scaling = {}
        scores = []
        for i, candidate in enumerate(tried):
            path = self.hidden / f"{i:03d}.safetensors"
            if path.exists():
                # The candidate was run before. Its charges count in the ledger again.
                for asked in plan.asked:
                    if asked.kind.startswith(f"{i}/"):
                        multiplier = plan.mechanisms[asked.kind].noise_multiplier
                        ledger.charge(
                            replace(asked.event, noise_multiplier=multiplier), list(asked.silos)
                        )
            else:
                self._carry_out(i, candidate, plan, ledger, records, path, scaling, stream=i)
            scores.append(float(load_file(path)["score"]))
            tick(i + 1, len(tried))
        best = int(np.argmin(scores))
        spent = ledger.epsilon()[0].tolist()
        return {
            "free": False,
            "trust": "isrl",
            "candidates": [row_of(c) | {"score": s} for c, s in zip(tried, scores, strict=True)],
            "chosen": row_of(tried[best]) | {"score": scores[best]},
            "order": tried[best],
            "file": self.hidden / f"{best:03d}.safetensors",
            "price": [
                self._price(n, b, s)
                for n, b, s in zip(self.records.names, self.budgets, spent, strict=True)
            ],
            "run_mu": [
                gdp_mu(b) * math.sqrt((1 - SCALING_SHARE * self.search.scale) / len(tried))
                for b in self.budgets
            ],
        }

    def select(self, repetitions: Repetitions, tick: Tick) -> dict:
        """Return the best of a secret random number of runs, each of a candidate drawn at random.
        Nothing else is released.
        """
        (budget,) = self.budgets
        tried = self.tried
        mu = self.mu
        records = self.records
        scaling = {}
        if self.once:
            records, scaling = self._scaled(
                self.once,
                MemoryLedger(self.once.rule, self.once.budgets.tolist(), self.records.counts),
            )
        coins = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(0x7E,)))
        runs = draw(repetitions, float(coins.random()))
        best = None
        file = None
        for k in range(runs):
            index = int(coins.integers(len(tried)))
            plan = self.each[index]
            path = self.hidden / f"{k:03d}-{index}.safetensors"
            if not path.exists():
                ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), self.records.counts)
                self._carry_out(0, tried[index], plan, ledger, records, path, scaling, stream=k)
            value = float(load_file(path)["score"])
            if best is None or value < best[0]:
                best = (value, index)
                file = path
            tick(k + 1, runs)
        spent = selected_epsilon(repetitions, GaussianRun(mu), budget.delta, beside=self.beside)
        score, index = best or (None, 0)
        return {
            "free": False,
            "trust": "central",
            "candidates": [row_of(c) for c in tried],
            "chosen": row_of(tried[index]) | {"score": score},
            "order": tried[index],
            "file": file,
            "run_mu": [mu],
            "price": [self._price("pool", budget, spent)],
            "mean_runs": repetitions.mean,
        }

    @staticmethod
    def _budget(mu: float, delta: float) -> Budget:
        """Return the budget with the epsilon of this mu at this delta."""
        return Budget(gdp_epsilon_exactly(mu, delta), delta)

    @staticmethod
    def _price(name: str, budget: Budget, spent: float) -> dict:
        """Return the row of a silo's budget and spend."""
        return {"name": name, **asdict(budget), "spent_epsilon": spent}

    def _plan(self, tried: Sequence[Order], budgets: Sequence[Budget], *, scaling: bool) -> Plan:
        """Return the plan of these candidates and their scores, with or without the scaling."""
        if scaling:
            scaled = self.records.x.shape[2]
        else:
            scaled = None
        return plan_several(tried, budgets, self.records.counts, scaled=scaled, score=ask_share)

    def _connect(
        self, records: Records, ledger: MemoryLedger, stream: tuple[int, ...]
    ) -> Federation:
        """Return a federation over these records. The stream decides which noise of the seed it
        uses.
        """
        everyone = Everyone(len(records))
        alike = Weights("equal", records.counts)
        return connect(
            "isrl", self.problem, records, ledger, [(self.seed, *stream)], everyone, alike
        )

    def _scaled(self, plan: Plan, ledger: MemoryLedger) -> tuple[Records, dict[str, Tensor]]:
        """Learn the scaling within the plan. Return the scaled records and the scaling."""
        fed = self._connect(self.records, ledger, (0, 0))
        ranges = plan.mechanisms["ranges"]
        moments = plan.mechanisms["moments"]
        mean, scale = learn_scaling(fed, self.records.x.shape[2], ranges=ranges, moments=moments)
        x = (self.records.x - mean.float()) / scale.float() * self.records.mask.unsqueeze(-1)
        scaling = {"scaling.mean": mean.float(), "scaling.scale": scale.float()}
        return Records(x, self.records.y, self.records.counts, self.records.names), scaling

    def _carry_out(
        self,
        i: int,
        candidate: Order,
        plan: Plan,
        ledger: MemoryLedger,
        records: Records,
        path: Path,
        scaling,
        *,
        stream: int,
    ) -> None:
        """Run one candidate and its score, and write both in one step. So an interruption leaves
        nothing half done.
        """
        fed = self._connect(records, ledger, (1, stream))
        start = self.problem.initial([candidate.coins])
        try:
            w = output(ready(candidate)(fed, self.problem, start, **of_order(plan.mechanisms, i)))
        except Refused as refusal:
            if refusal.code != "not-finite":
                raise
            w = torch.full_like(start, torch.nan)
        # A run that diverged has the worst score without a question: w itself shows it.
        value = 1.0
        if bool(torch.isfinite(w).all()):
            fed = self._connect(wrong(self.problem, records, w), ledger, (2, stream))
            value = ask_share(fed, plan.mechanisms[f"{i}/score"])
        score = torch.tensor(value, dtype=torch.float64)
        atomic.write(path, save({"w": w.contiguous(), "score": score, **scaling}))
