"""`silodp train`: one private run with all silos in one process. Each silo still pays for, and is protected in, everything it says.

The folder gets run.json and progress.jsonl on the way and, at the end, model.safetensors, transcript and spent.json. Before the first
question it gets the seed of all noise too, which goes at the end: a run that was interrupted is computed again from its start with that
seed, every release is the one that it was, and nothing new is said.
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
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from safetensors.torch import save_file
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.extension import is_file
from silodp.core.extension import source as own_file
from silodp.core.problem.build import Load, Words, build, feature_map
from silodp.core.problem.problem import Problem
from silodp.core.problem.reading import plain_text
from silodp.core.problem.task import Task
from silodp.core.query import Query
from silodp.host.model import facts
from silodp.lab.hidden import kept_seed, mark_of
from silodp.lab.pinned import Code, pinned, refuse_imports
from silodp.lab.planning import warn_of_delta
from silodp.lab.runfolder import SEED, begin, go_on, make_folder, refuse_others, write_environment
from silodp.lab.simulation import asked_by, connect
from silodp.lab.source import Loaded, Source
from silodp.server.algorithms import find
from silodp.server.estimates.scaling import learn_scaling
from silodp.server.federation import Answered, Channel, Everyone, StopRun
from silodp.server.folder import open_run, read_run, silo_rows, write_json, write_model
from silodp.server.order import FILES, MODEL, Order, budgets_of, with_default_delta
from silodp.server.output import output
from silodp.server.prepare import AGAINST, Prepared, prepare
from silodp.server.progress import Progress, measured, measured_total
from silodp.server.settings import samplings_by_name
from silodp.server.tally import SeenTotals
from silodp.silo.data.heldout import split_records
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.evaluate import balanced_accuracy, error_rate

UNCHARGED = "The built-in data sets come standardised with statistics of the raw data, as in the paper; that is not charged to the budget."


def train(order: Order, source: Source, folder: Path, *, quiet: bool = True, resume: bool = False) -> dict[str, Any]:
    """Checks everything that can be checked, loads, trains, and returns the summary that --json prints; with `resume` the run in `folder`.

    Nothing is written before all that can be refused has been checked.
    """
    order = replace(order, model=order.model or MODEL)
    algorithm = find(order.algorithm)
    algorithm.schedule(order.schedule)
    samplings = samplings_by_name(order.sampling, algorithm, order.rounds)
    loaded = source.load(order.coins)
    refuse_others(folder)
    records, mark = loaded.records, None
    budgets = budgets_of(order, records.names, records.counts, samplings)
    large = with_default_delta(order, records.names, records.counts)
    if source.held_out:
        mark, (records, _) = mark_of(records), split_records(records, source.held_out)
    code, raw = Code(), math.prod(records.x.shape[2:])
    problem = build(words_of(order, source, loaded.classes), raw, load=code.load)
    files = {name: text for name in FILES[1:] if (text := getattr(order, name))}
    if resume:
        refuse_imports(order.algorithm, *files.values())
    records = mapped(records, order, code.load)
    features = records.x.shape[-1]
    scaled = features if loaded.scale == "private" else None
    made = prepare(order, records.names, records.counts, budgets=budgets, dimension=problem.dim, scaled=scaled)
    with Bar(TextColumn("round"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), disable=quiet) as bar:
        task = bar.add_task("rounds", total=made.order.rounds)

        def progress(iterates: Iterator[Tensor]) -> Iterator[Tensor]:
            warn_of_delta(large)  # only now: a mistake gets its own sentence and no other
            for w in iterates:
                bar.advance(task)
                yield w

        make_folder(folder)
        run = _Run(made, problem, records, folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(run.record))
            (go_on if resume else begin)(folder)
            seed = kept_seed(folder / SEED, order.seed, records)
            coin = int(hashlib.sha256(f"public coin {seed}".encode()).hexdigest()[:7], 16) if order.seed is None else order.seed
            if mark and not (folder / "records.json").exists():
                (folder / "records.json").write_text(mark)
            start = problem.initial([coin])
            own = code.of(**files) | ({"algorithm_sha256": own_file(made.algorithm.run)} if is_file(order.algorithm) else {})
            facts = _facts(order, source, loaded, run) | pinned(own, start, made.plan.mechanisms)
            open_run(folder, facts, advice="restore that, or start another run with --new")
            stack.enter_context(_ending(folder))
            mean, scale = (
                run.scaling(seed) if scaled else (torch.zeros(features, dtype=torch.float64), torch.ones(features, dtype=torch.float64))
            )
            w = output(run.iterates(seed, start, progress), made.order.output, seed=coin)
            if not bool(torch.isfinite(w).all()):
                raise BadInput(f"training diverged with step {made.order.step:g}; use a smaller --step (the budget of this run is spent)")
            found = {}
            if loaded.test is not None:
                x, y = loaded.test
                x = feature_map(order.feature_map, code.load).of(x.flatten(1)) if order.feature_map else x.flatten(1)
                found = _score(problem, w, x, y, loaded.classes)
            scaling = {"scaling.mean": mean.float(), "scaling.scale": scale.float()}
            names = loaded.features or [f"x{j}" for j in range(raw)]
            reads = plain_text(names, source.class_names(loaded.classes), source.label, loaded.ranges)
            return run.write(w, source, reads, scaling, UNCHARGED if source.data else "", found)


def read_back(folder: Path) -> tuple[Order, Source]:
    """What the run in `folder` was told."""
    found = read_run(folder)
    return Order.read(found, folder), Source.read(found, folder)


def to_resume(folder: Path, order: Order, source: Source, given: Collection[str]) -> tuple[Order, Source]:
    """What the run in `folder` was told; BadInput if one of the options `given` asks for something else."""
    was_order, was_source = read_back(folder)
    was, now = was_order.words() | was_source.words(), replace(order, model=order.model or MODEL).words() | source.words()
    if differs := sorted(name for name in given if name in now and now[name] != was[name]):
        raise BadInput(f"the run in {folder} was begun with another {', '.join(differs)}; leave that out to go on with it")
    return was_order, was_source


def words_of(order: Order, source: Source, classes: int) -> Words:
    return Words(order.model or MODEL, source.read_by or Task.plain(classes), order.prox, order.loss, order.feature_map)


def mapped(records: Records, order: Order, load: Load) -> Records:
    """The records as the model sees them, one row of features each."""
    flat = Records(records.x.flatten(2), records.y, records.counts, records.names)
    if not order.feature_map:
        return flat
    function = feature_map(order.feature_map, load)
    return Records.of([(function.of(x[:n]), y[:n]) for x, y, n in zip(flat.x, flat.y, flat.counts, strict=True)], flat.names)


def _facts(order: Order, source: Source, loaded: Loaded, run: _Run) -> dict[str, Any]:
    """run.json: what is trained, known before the first question; n is public.

    Another model, or another version's arithmetic, under the noise of the run before would show where the two differ.
    """
    made = run.made
    samplings = sorted({str(sampling) for sampling in made.samplings.values()})
    return {
        "kind": "train", "order": order.words(), "source": source.words(), "algorithm": made.algorithm.name, "settings": made.settings,
        "rounds": made.order.rounds, "step": made.order.step, "clip": made.order.clip, "sampling": ", ".join(samplings),
        "model": Path(order.model or MODEL).name, "rule": made.plan.rule.name, "scale": loaded.scale, "output": made.order.output,
        "features": run.records.x.shape[-1], "classes": loaded.classes, "parameters": run.problem.dim,
        "silos": silo_rows(run.records.names, run.records.counts, run.budgets),
        "definition": hashlib.sha256(run.problem.definition().encode()).hexdigest(),
    }  # fmt: skip


@contextlib.contextmanager
def _ending(folder: Path) -> Iterator[None]:
    """A run that comes to an end of its own, good or bad, is not resumed: its seed goes. One that is interrupted or killed keeps it."""
    try:
        yield
    except StopRun as stop:
        (folder / SEED).unlink(missing_ok=True)
        raise BadInput(f"the run has ended: {stop}") from None
    except (BadInput, Refused):
        (folder / SEED).unlink(missing_ok=True)
        raise
    (folder / SEED).unlink(missing_ok=True)


def _score(problem: Problem, w: Tensor, x: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    if not classes:
        return {"test_loss": float(problem.losses(w, x, y).mean())}
    return {"test_error": float(error_rate(problem, w, x, y)), "balanced_accuracy": float(balanced_accuracy(problem, w, x, y))}


# --- the run ---------------------------------------------------------------------------------------------------------------------


class _Run:
    """One run under its trust: asks, writes a line of progress for each question, and adds up what each silo has spent."""

    def __init__(self, made: Prepared, problem: Problem, records: Records, folder: Path) -> None:
        self.made, self.problem, self.records, self.folder = made, problem, records, folder
        self._counts = tuple(made.plan.counts)  # of a curator's ledger: one silo with all records
        self.ledger = MemoryLedger(made.plan.rule, made.plan.budgets.tolist(), self._counts)
        self.record = Progress(folder, keep=False)
        self._totals, self.rounds, self.values = [SeenTotals() for _ in records.names], list[dict[str, Any]](), dict[str, Tensor]()
        self._question, self._round, self._stage, self._asked = 0, 1, 0, [0, 0]

    @property
    def budgets(self) -> list[Any]:
        """Of each silo."""
        return self.made.budgets if len(self.made.budgets) == len(self.records.names) else self.made.budgets * len(self.records.names)

    def scaling(self, seed: int) -> tuple[Tensor, Tensor]:
        """Mean and scale of each feature, learnt within the budget; the records are scaled by them from here on."""
        fed, mechanisms = self._connected(seed, Everyone(len(self.records))), self.made.plan.mechanisms
        mean, scale = learn_scaling(fed, self.records.x.shape[-1], ranges=mechanisms["ranges"], moments=mechanisms["moments"])
        scaled = (self.records.x - mean.float()) / scale.float()
        self.records = Records(scaled, self.records.y, self.records.counts, self.records.names)
        return mean, scale

    def iterates(self, seed: int, start: Tensor, progress: Callable[[Iterator[Tensor]], Iterator[Tensor]]) -> Iterator[Tensor]:
        self._stage = 1
        fed = self._connected(seed, self.made.participation())
        for w in progress(self.made.run(fed, self.problem, start, **self.made.mechanisms)):
            self._round += 1
            yield w

    def _connected(self, seed: int, who: Everyone) -> Any:
        seeds, weights = [(seed, self._stage + 1)], self.made.weights(self.records.counts)
        trust, watched = self.made.order.trust, lambda channel: _Watched(channel, self.seen)
        return connect(trust, self.problem, self.records, self.ledger, seeds, who, weights, watched)

    def seen(self, query: Query, asked: Sequence[int], answer: Answered) -> None:
        """Queries are public and releases are private already, so both may be stored."""
        mechanism, trust, names = query.mechanism, self.made.order.trust, self.records.names
        stage = int(self._stage and "ranges" in self.made.plan.mechanisms)
        name = f"{stage}/{self._asked[stage]:05d}"
        self._asked[stage] += 1
        row = {"release": name, "kind": mechanism.kind, "statistic": type(query.statistic).__name__, "silos": list(asked)}
        self.rounds.append(row | {"clip": float(torch.as_tensor(mechanism.clip).max())} | asked_by(mechanism))
        self.values[name] = answer.value[0].contiguous()
        if mechanism.total:
            for i in answer.silos:
                self._totals[i].add(mechanism.sampling.bucket, query.event(), self.records.counts[i])  # type: ignore[arg-type]
            records = mechanism.contributed(self.records.counts[i] for i in answer.silos)
            line = measured_total(query, answer.value[:, 0], records, [names[i] for i in answer.silos])
        elif trust == "central":
            line = measured(query, answer.value[0], (0,), self._counts, ("all",)) | {"answered": {names[i]: {} for i in asked}}
        else:
            line = measured(query, answer.value[0], answer.silos, self._counts, names)
        used = np.broadcast_to(np.asarray(self.ledger.used())[0], len(names))
        if self.made.plan.rule.name != "committed":  # its prices take seconds: a reader then takes the whole budget for spent
            line["epsilon"] = dict(zip(names, self.spent(), strict=True))
        self.record.write(
            self._question, {"round": self._round, "used": dict(zip(names, used.tolist(), strict=True)), "dropped": {}} | line
        )
        self._question += 1

    def spent(self) -> list[float]:
        """Epsilon of each silo at its own delta, against whoever the trust does not name."""
        if self.made.order.trust == "shuffle":
            return [seen.epsilon(budget.delta) for seen, budget in zip(self._totals, self.budgets, strict=True)]
        return np.broadcast_to(np.asarray(self.ledger.epsilon())[0], len(self.records.names)).tolist()

    def write(
        self, w: Tensor, source: Source, reads: str, scaling: dict[str, Tensor], note: str, found: dict[str, float]
    ) -> dict[str, Any]:
        """Model, transcript, environment and, at last, spent.json: with it the run counts as finished."""
        order, folder = self.made.order, self.folder
        about = facts(model=order.model or MODEL, prox=order.prox, loss=order.loss, feature_map=order.feature_map)
        about |= {"algorithm": self.made.algorithm.name} | ({"schema": source.read_by.text} if source.read_by else {"plain": reads})
        model = write_model(folder, self.problem, w, about, scaling)
        save_file(self.values, folder / "transcript.safetensors")
        (folder / "transcript.jsonl").write_text("".join(json.dumps(r) + "\n" for r in self.rounds))
        silos = [
            {"name": name, "epsilon": b.epsilon, "delta": b.delta, "spent_epsilon": float(s)}
            | ({"local_epsilon_at_most": seen.local(b.delta)} if order.trust == "shuffle" else {})
            for name, b, s, seen in zip(self.records.names, self.budgets, self.spent(), self._totals, strict=True)
        ]
        summary = {
            "algorithm": self.made.algorithm.name, "questions": len(self.rounds), "answers": sum(len(r["silos"]) for r in self.rounds),
            "parameters": self.problem.dim, "rule": self.made.plan.rule.name, "trust": order.trust, "said": AGAINST[order.trust],
            "silos": silos, "model": str(model), "note": note, **found,
        }  # fmt: skip
        noise = "seeded pseudo-random float noise, " + ("seed from the operating system" if order.seed is None else f"seed {order.seed}")
        write_environment(folder, noise=noise)
        write_json(folder / "spent.json", summary)
        return summary


class _Watched:
    """A channel that shows what passes through it."""

    def __init__(self, inner: Channel, seen: Callable[[Query, Sequence[int], Answered], None]) -> None:
        self._inner, self._seen = inner, seen

    def ask(self, query: Query, silos: Sequence[int]) -> Answered:
        answer = self._inner.ask(query, silos)
        self._seen(query, silos, answer)
        return answer
