"""`silodp train`: one private run with all silos in one process. Each silo pays for everything that
it releases, and is protected in it.

The folder gets run.json and progress.jsonl during the run. At the end it gets model.safetensors,
transcript and summary.json. Before the first question it also gets the seed of all noise, which is
deleted at the end. A run that was interrupted is computed again from its start with that seed.
Every release is then the same as before, so nothing new is released.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.extension import is_file
from silodp.core.features.feature_map import FeatureMap, feature_map
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.problem.build import Load, Words, build
from silodp.core.problem.losses import Ordinal, Weighted
from silodp.core.problem.person import unit
from silodp.core.problem.problem import Problem
from silodp.core.problem.reading import plain_text
from silodp.core.problem.task import Task
from silodp.core.query import Query
from silodp.core.statistics.score import judged
from silodp.host import atomic
from silodp.host.extension import ran
from silodp.host.model import facts
from silodp.runs import RunFolder
from silodp.server.advice import Advice
from silodp.server.algorithms import find
from silodp.server.cautions import cautions
from silodp.server.estimates.placing import assumed, bins_of
from silodp.server.estimates.scaling import learn_scaling
from silodp.server.estimates.scoring import as_rows, asked_of, scores_of
from silodp.server.federation import Answered, Channel, Everyone, Federation
from silodp.server.folder import open_run, read_run, silo_rows
from silodp.server.kept import NoRoom
from silodp.server.loop import Run
from silodp.server.order import AUTO, FILES, MODEL, Order, budgets_of, with_default_delta
from silodp.server.prepare import Prepared, prepare
from silodp.server.progress import Progress, measured, measured_total
from silodp.server.settings import samplings_by_name
from silodp.silo.data.heldout import split_records
from silodp.silo.data.records import Records
from silodp.silo.fits.figures import Scale, scale_of
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.advised import advised
from silodp.simulation.comparing import compare_silos, write_comparison
from silodp.simulation.connect import asked_by, connect
from silodp.simulation.hidden import kept_seed, mark_of, places_key
from silodp.simulation.pinned import Code, pinned, refuse_imports
from silodp.simulation.planning import warn, warn_of_delta
from silodp.simulation.runfolder import (
    begin,
    go_on,
    make_folder,
    refuse_others,
    seeded,
    write_environment,
)
from silodp.simulation.source import Loaded, Source
from silodp.simulation.sweep import Tick, unseen
from silodp.testing.evaluate import balanced_accuracy, error_rate

UNCHARGED = (
    "The built-in data sets come standardised with statistics of the raw data, as in the "
    "paper; that is not charged to the budget."
)


def train(
    order: Order,
    source: Source,
    folder: Path,
    *,
    resume: bool = False,
    tick: Tick = unseen,
    on_advice: Callable[[Advice], None] = lambda advice: None,
) -> dict[str, Any]:
    """Check the order, load the records, train, and return the summary that --json prints.

    Arguments:

    - `order`: what to train. What it leaves open is chosen from public facts.
    - `source`: the records.
    - `folder`: the run's folder.
    - `resume`: continue the interrupted run in the folder.
    - `tick`: called with the progress.
    - `on_advice`: called with the choices for an open order.

    Nothing is written before everything that can be refused has been checked. Raise BadInput for an
    order that cannot be run.
    """
    open_order = order.algorithm == AUTO
    samplings = {}
    if not open_order:
        order = replace(order, model=order.model or MODEL)
        find(order.algorithm).schedule(order.schedule)
        samplings = samplings_by_name(order.sampling, find(order.algorithm), order.rounds)
    loaded = source.load(order.coins, raw=bool(order.feature_map))
    refuse_others(folder)
    records = loaded.records
    mark = None
    held = None
    budgets = budgets_of(order, records.names, records.counts, samplings)
    large = with_default_delta(order, records.names, records.counts)
    if source.held_out:
        # The mark is of all records, so that an evaluation finds the same split.
        mark = mark_of(records)
        records, held = split_records(records, source.held_out, places_key(order.seed))
    code = Code()
    advice = None
    if open_order:
        advice = advised(order, source, loaded, records.names, records.counts, budgets, code.load)
        on_advice(advice)
        order = advice.order
    problem = build(words_of(order, source, loaded.classes), records.features, load=code.load)
    user_files = {name: text for name in FILES[1:] if (text := getattr(order, name))}
    if resume:
        refuse_imports(order.algorithm, *user_files.values())
    records = mapped(records, order, source, code.load)
    if held:
        held = mapped(held, order, source, code.load)
    if loaded.scale == "private":
        scaled = records.x.shape[-1]
    else:
        scaled = None
    made = prepare(
        order, records.names, records.counts, budgets=budgets, dimension=problem.dim, scaled=scaled
    )
    make_folder(folder)
    with contextlib.closing(Progress(folder, keep=False)) as record:
        if resume:
            go_on(folder)
        else:
            begin(folder)
        files = RunFolder(folder)
        seed = kept_seed(files.seed, order.seed, records)
        if order.seed is None:
            coin = int(hashlib.sha256(f"public coin {seed}".encode()).hexdigest()[:7], 16)
        else:
            coin = order.seed
        if mark and not files.record_mark.exists():
            atomic.write(files.record_mark, mark, mode=0o644)
        names = loaded.features or [f"x{j}" for j in range(loaded.records.features)]
        reads = plain_text(names, source.class_names(loaded.classes), source.label, loaded.ranges)
        simulation = _Simulation(
            made,
            problem,
            records,
            folder,
            seed=seed,
            source=source,
            reads=reads,
            record=record,
        )
        if held:
            task = source.read_by or Task.plain(loaded.classes)
            simulation.compare(held, scale_of(task, own_loss=bool(order.loss)))
        run = Run(
            made,
            problem,
            folder,
            coin,
            connect=simulation.connect,
            journal=_NoJournal(),
            reporter=simulation,
        )
        hashes = code.of(**user_files)
        if is_file(order.algorithm):
            hashes["algorithm_sha256"] = ran(order.algorithm)
        description = _facts(order, source, loaded, simulation) | pinned(
            hashes, problem.initial([coin]), made.plan.mechanisms
        )
        open_run(
            folder,
            description,
            own={"advice": advice.words() if advice else None},
            advice="restore that, or start another run with --new",
        )
        if loaded.test is not None:
            x, y = loaded.test
            function = map_of(order, source, code.load)
            if function:
                x = function.of(x.flatten(1))
            else:
                x = x.flatten(1)
            simulation.score = lambda w: _score(problem.by_row, w, x, y, loaded.classes)
        # The warning comes after all checks, so that an error is the only message.
        warn_of_delta(large)
        warn(cautions(order, records.names, records.counts))
        tick(0, run.total)
        with _ending(folder):
            for count in run:
                tick(count, run.total)
    return run.summary


def read_back(folder: Path) -> tuple[Order, Source]:
    """Return the order and the source of the run in `folder`."""
    description = read_run(folder)
    return Order.read(description, folder), Source.read(description, folder)


def to_resume(
    folder: Path, order: Order, source: Source, given: Collection[str]
) -> tuple[Order, Source]:
    """Return the order and the source of the run in `folder`. Raise BadInput if one of the options
    `given` differs from them.
    """
    was_order, was_source = read_back(folder)
    was = was_order.words() | was_source.words()
    now = order.words() | source.words()
    if differs := sorted(name for name in given if name in now and now[name] != was[name]):
        raise BadInput(
            f"the run in {folder} was begun with another {', '.join(differs)}; leave that "
            "out to resume it"
        )
    return was_order, was_source


def words_of(order: Order, source: Source, classes: int) -> Words:
    """Return the words that define the problem of an order over this source."""
    return Words(
        order.model or MODEL,
        source.read_by or Task.plain(classes),
        order.prox,
        order.loss,
        order.feature_map,
    )


def map_of(order: Order, source: Source, load: Load) -> FeatureMap | None:
    """Return the order's map of features, or None without one."""
    if source.read_by:
        shape = source.read_by.shape
    else:
        shape = ()
    if order.feature_map:
        return feature_map(order.feature_map, load, shape)
    return None


def mapped(records: Records, order: Order, source: Source, load: Load) -> Records:
    """Return the records as the model reads them: one row of features for each record, or one for
    each row of a person.
    """
    rows = records.y.dim()
    flat = Records(records.x.flatten(rows), records.y, records.counts, records.names)
    if not (function := map_of(order, source, load)):
        return flat
    pairs = [(x[:n], y[:n]) for x, y, n in zip(flat.x, flat.y, flat.counts, strict=True)]
    return Records.of(
        [(function.of(x.flatten(0, rows - 2)).unflatten(0, y.shape), y) for x, y in pairs],
        flat.names,
    )


def _facts(order: Order, source: Source, loaded: Loaded, run: _Simulation) -> dict[str, Any]:
    """Return the public facts of the run for run.json, all known before the first question.

    A resumed run must have the same facts. Another model, or the arithmetic of another version,
    under the same noise would show where the two differ.
    """
    made = run.made
    samplings = sorted({str(sampling) for sampling in made.samplings.values()})
    return {
        "kind": "train",
        "order": order.words(),
        "source": source.words(),
        "algorithm": Path(made.algorithm.name).name,
        "settings": made.settings,
        "rounds": made.order.rounds,
        "step": made.order.step,
        "clip": made.order.clip,
        "sampling": ", ".join(samplings),
        "model": Path(order.model or MODEL).name,
        "rule": made.plan.rule.name,
        "scale": loaded.scale,
        "output": made.order.output,
        "features": run.records.x.shape[-1],
        "classes": loaded.classes,
        "parameters": run.problem.dim,
        "silos": silo_rows(run.records.names, run.records.counts, run.budgets),
        "unit": unit(run.problem.person),
        "definition": hashlib.sha256(run.problem.definition().encode()).hexdigest(),
    }


@contextlib.contextmanager
def _ending(folder: Path) -> Iterator[None]:
    """Delete the seed when the run ends by itself, with or without an error. Such a run is not
    resumed.

    A run that is interrupted or killed, or that found no room on the disk, keeps its seed.
    """
    seed = RunFolder(folder).seed
    try:
        yield
    except NoRoom:
        raise
    except (BadInput, Refused):
        seed.unlink(missing_ok=True)
        raise
    seed.unlink(missing_ok=True)


TEST_BINS = 500
"""Number of bins for the score of test records, to which no noise is added."""


def _score(problem: Problem, w: Tensor, x: Tensor, y: Tensor, classes: int) -> dict[str, Any]:
    """Return the model's quality on public test records, without noise."""
    if not classes:
        return {"test_loss": float(problem.losses(w, x, y).mean())}
    rates = {
        "test_error": float(error_rate(problem, w, x, y)),
        "balanced_accuracy": float(balanced_accuracy(problem, w, x, y)),
    }
    if isinstance(problem.loss, Ordinal):
        return rates
    threshold = 0.5
    if isinstance(problem.loss, Weighted):
        threshold = problem.loss.weights[0] / sum(problem.loss.weights[:2])
    bins = bins_of(assumed(0.5), TEST_BINS, threshold)
    asked = asked_of(classes, None, problem.loss, bins=bins)
    with torch.no_grad():
        outputs = problem.outputs(w, x)[0].double().flatten(1)
        losses = problem.record_losses(outputs, y)
        scores = judged(problem.loss, outputs, losses, y, asked.statistic(w))
        value = scores.mean(0).numpy()
    return rates | {"test": as_rows([scores_of("test", len(y), value, 0.0, asked)], asked)[0]}


# --- the run -------------------------------------------------------------------------------------


class _NoJournal:
    """A journal without content. A run in one process is computed again from its seed."""

    def iterate(self, number: int, w: Tensor) -> None:
        """Record nothing."""

    def stop(self, reason: str) -> None:
        """Raise BadInput: a simulation that ends early has no result."""
        raise BadInput(f"the run has ended: {reason}")

    def refuse(self) -> None:
        """Remove nothing. `_ending` deletes the seed."""

    def close(self) -> None:
        """Close nothing."""


class _Simulation:
    """The connection of a run to the records under its trust, and the report of the run. It writes
    a line of progress for each question, and adds up what each silo has spent.
    """

    def __init__(
        self,
        made: Prepared,
        problem: Problem,
        records: Records,
        folder: Path,
        *,
        seed: int,
        source: Source,
        reads: str,
        record: Progress,
    ) -> None:
        self.made = made
        self.problem = problem
        self.records = records
        self.files = RunFolder(folder)
        self._seed = seed
        self._source = source
        self._reads = reads
        self._record = record
        self._iterates = 0
        # A curator's ledger has one silo with all records.
        self._counts = tuple(made.plan.counts)
        self._ledger = MemoryLedger(made.plan.rule, made.plan.budgets.tolist(), self._counts)
        self._alone = MemoryLedger(GDP(), Budget(math.inf, 0.5), self._counts)
        """What the same answers cost against a party that sees the silos' own numbers."""
        self._rounds = list[dict[str, Any]]()
        self._values = dict[str, Tensor]()
        self._question = 0
        self._stage = 0
        """0 while the scaling is learned, 1 in training."""
        self._questions_of_stage = [0, 0]
        features = records.x.shape[-1]
        self._scaling = (
            torch.zeros(features, dtype=torch.float64),
            torch.ones(features, dtype=torch.float64),
        )
        self._held: tuple[Records, Scale] | None = None
        self.score: Callable[[Tensor], dict[str, float]] = lambda w: {}

    def compare(self, held: Records, scale: Scale) -> None:
        """Let the result include alone, together and personal on these raw records."""
        self._held = held, scale

    @property
    def budgets(self) -> list[Any]:
        """Return the budget of each silo."""
        if len(self.made.budgets) == len(self.records.names):
            return self.made.budgets
        return self.made.budgets * len(self.records.names)

    def connect(self) -> Federation:
        """Return the federation that the algorithm asks.

        If the plan includes the scaling, it is learned first, within the budget. From then on the
        records are scaled.
        """
        mechanisms = self.made.plan.mechanisms
        if "ranges" in mechanisms:
            fed = self._connected(Everyone(len(self.records)))
            mean, scale = learn_scaling(
                fed,
                self.records.x.shape[-1],
                ranges=mechanisms["ranges"],
                moments=mechanisms["moments"],
            )
            scaled = (self.records.x - mean.float()) / scale.float()
            self.records = Records(scaled, self.records.y, self.records.counts, self.records.names)
            self._scaling = (mean, scale)
        self._stage = 1
        return self._connected(self.made.participation())

    def _connected(self, participation: Everyone) -> Federation:
        """Return a federation over the records, whose channel reports each question."""
        seeds = [(self._seed, self._stage + 1)]
        weights = self.made.weights(self.records.counts)
        trust = self.made.order.trust
        return connect(
            trust,
            self.problem,
            self.records,
            self._ledger,
            seeds,
            participation,
            weights,
            lambda channel: _Watched(channel, self._record_answer),
            colluding=self.made.order.colluding,
        )

    def _record_answer(self, query: Query, asked: Sequence[int], answer: Answered) -> None:
        """Store a question and its answer, and write its line of progress.

        Queries are public and releases are private already, so both may be stored.
        """
        mechanism = query.mechanism
        trust = self.made.order.trust
        names = self.records.names
        stage = int(self._stage and "ranges" in self.made.plan.mechanisms)
        name = f"{stage}/{self._questions_of_stage[stage]:05d}"
        self._questions_of_stage[stage] += 1
        row = {
            "release": name,
            "kind": mechanism.kind,
            "statistic": type(query.statistic).__name__,
            "silos": list(asked),
        }
        self._rounds.append(
            row | {"clip": float(torch.as_tensor(mechanism.clip).max())} | asked_by(mechanism)
        )
        self._values[name] = answer.value[0].contiguous()
        if mechanism.total:
            self._alone.charge(query.event().alone(), answer.silos)
            records = mechanism.contributed(self.records.counts[i] for i in answer.silos)
            line = measured_total(
                query, answer.value[:, 0], records, [names[i] for i in answer.silos]
            )
        elif trust == "central":
            line = measured(query, answer.value[0], (0,), self._counts, ("all",)) | {
                "answered": {names[i]: {} for i in asked}
            }
        else:
            line = measured(query, answer.value[0], answer.silos, self._counts, names)
        used = np.broadcast_to(np.asarray(self._ledger.used())[0], len(names))
        # The prices of the rule "committed" take seconds. Without the line's epsilon a reader
        # counts the whole budget as spent.
        if self.made.plan.rule.name != "committed":
            line["epsilon"] = dict(zip(names, self.spent(), strict=True))
        line |= {
            "round": self._iterates + 1,
            "used": dict(zip(names, used.tolist(), strict=True)),
            "dropped": {},
        }
        self._record.write(self._question, line)
        self._question += 1

    def spent(self) -> list[float]:
        """Return the epsilon of each silo at its own delta, against every party that the trust does
        not name.
        """
        epsilons = np.asarray(self._ledger.epsilon())[0]
        return np.broadcast_to(epsilons, len(self.records.names)).tolist()

    def _local(self) -> list[float]:
        """Return the epsilon of each silo against a party that sees its own numbers."""
        if not self.made.order.totals:
            return self.spent()
        delta = np.array([[budget.delta for budget in self.budgets]])
        return np.asarray(self._alone.epsilon(delta))[0].tolist()

    def progress(self, iterates: int) -> int:
        """Return the number of iterates. The next question belongs to the round after it."""
        self._iterates = iterates
        return iterates

    def without_model(self) -> str:
        """Return nothing, because a run without an iterate leaves nothing."""
        return ""

    def model(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return the words of the order that describe the model, and the scaling of the records."""
        order = self.made.order
        schema = self._source.read_by
        words = facts(
            model=order.model or MODEL,
            prox=order.prox,
            loss=order.loss,
            feature_map=order.feature_map,
        )
        if schema:
            words |= {"schema": schema.text}
        else:
            words |= {"plain": self._reads}
        return words, {
            "scaling.mean": self._scaling[0].float(),
            "scaling.scale": self._scaling[1].float(),
        }

    def result(self, w: Tensor, iterates: int, ended: str) -> dict[str, Any]:
        """Return what was asked and spent. Write the transcript and the environment."""
        order = self.made.order
        rounds = self._rounds
        atomic.write(self.files.releases, save(self._values), mode=0o644)
        atomic.write(
            self.files.transcript,
            "".join(json.dumps(r) + "\n" for r in rounds),
            mode=0o644,
        )
        write_environment(self.files.path, noise=seeded(order.seed))
        if self._held:
            self._compare(w[0], *self._held)
        silos = []
        for name, budget, spent, local in zip(
            self.records.names, self.budgets, self.spent(), self._local(), strict=True
        ):
            row = {
                "name": name,
                "epsilon": budget.epsilon,
                "delta": budget.delta,
                "spent_epsilon": float(spent),
            }
            if order.totals:
                row["local_epsilon_at_most"] = local if math.isfinite(local) else None
            silos.append(row)
        if self._source.standardised(raw=bool(order.feature_map)):
            note = UNCHARGED
        else:
            note = ""
        return {
            "questions": len(rounds),
            "answers": sum(len(r["silos"]) for r in rounds),
            "rule": self.made.plan.rule.name,
            "silos": silos,
            "note": note,
            **self.score(w),
        }

    def _compare(self, w: Tensor, held: Records, scale: Scale) -> None:
        mean, deviation = self._scaling
        x = (held.x - mean.float()) / deviation.float()
        scaled = Records(x, held.y, held.counts, held.names)
        found = compare_silos(self.problem, w, scale, self.records, scaled)
        write_comparison(self.files, found)


class _Watched:
    """A channel that reports each question with its answer."""

    def __init__(
        self, inner: Channel, on_answer: Callable[[Query, Sequence[int], Answered], None]
    ) -> None:
        self._inner = inner
        self._on_answer = on_answer

    def ask(self, query: Query, silos: Sequence[int]) -> Answered:
        """Ask the inner channel, report the answer, and return it."""
        answer = self._inner.ask(query, silos)
        self._on_answer(query, silos, answer)
        return answer
