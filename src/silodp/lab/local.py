"""`silodp train`: one private run with all silos in one process. Each silo still pays for, and is protected in, everything it says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.losses import Loss
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import by_name
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.core.query import Query, Release
from silodp.core.sampling import FullBatch, Sampling
from silodp.lab.hidden import kept_seed
from silodp.lab.pinned import file_hash, pinned, refuse_imports
from silodp.lab.runfolder import SEED, begin, go_on, make_folder, refuse_others, write_environment
from silodp.server.algorithms import Algorithm
from silodp.server.estimates.scaling import learn_scaling
from silodp.server.federation import Everyone, Federation
from silodp.server.output import check_rule, output
from silodp.server.plan import Plan, calibrate
from silodp.server.progress import Progress, measured
from silodp.server.settings import default_shares, prepared
from silodp.silo.answer.simulated import Simulated
from silodp.silo.data.records import Records
from silodp.silo.gate import Gate
from silodp.silo.ledger.memory import MemoryLedger
from silodp.testing.evaluate import balanced_accuracy, error_rate
from silodp.wire.inprocess import InProcess

SCALING_SHARE = 0.1
"""Part of the budget (mu^2) that private feature scaling takes."""


@dataclass(frozen=True)
class Order:
    """What to train: everything that `silodp train` was told, checked."""

    algorithm: Algorithm
    settings: dict
    step: float
    clip: float
    sampling: Sampling
    model: str
    prox: str
    budgets: list[Budget]
    classes: int
    participation: Callable[[], Everyone]
    scale: str
    """"private" (learnt within the budget), "public" (already applied from ranges the user gave) or "none"."""
    output_rule: str = "last"
    rule: str | None = None
    anchor_share: float | None = None
    seed: int | None = None
    schema: Schema | None = None


class Transcript:
    """A channel that keeps what passes through it: queries are public and releases are private already, so both may be stored."""

    def __init__(self, inner: InProcess, seen: Callable[[Query, Release], None] = lambda query, release: None) -> None:
        self._inner, self._seen = inner, seen
        self.rounds: list[dict] = []
        self.values: dict[str, Tensor] = {}

    def ask(self, query: Query, silos) -> Release:
        release = self._inner.ask(query, silos)
        name = f"{len(self.rounds):05d}"
        multiplier = torch.as_tensor(release.event.noise_multiplier)
        self.rounds.append(
            {
                "release": name,
                "kind": query.mechanism.kind,
                "statistic": type(query.statistic).__name__,
                "silos": list(silos),
                "clip": float(torch.as_tensor(query.mechanism.clip).max()),
                "noise_multiplier": multiplier.flatten().tolist(),
            }
        )
        self.values[name] = release.value[0].contiguous()
        self._seen(query, release)
        return release


def train(
    order: Order,
    records: Records,
    folder: Path,
    progress: Callable[[Iterator[Tensor]], Iterator[Tensor]] = iter,
    held_out: tuple[Tensor, Tensor] | None = None,
    note: str = "",
    about: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    resume: bool = False,
) -> dict:
    """Calibrates, trains, writes run.json and progress.jsonl on the way and, at the end, model.safetensors, transcript and spend, and returns the summary that --json prints.

    Before the first question the folder gets `files` too, and the seed of all noise, which goes at the end. With `resume` the run that was
    interrupted there is computed again from its start with that seed: every release is the one that it was, so that nothing new is said.
    Nothing is written before all that can be refused has been checked.
    """
    refuse_others(folder)
    check_rule(order.output_rule)
    features = math.prod(records.x.shape[2:])
    task, shape = (order.schema.task, order.schema.shape) if order.schema else (Task.plain(order.classes), ())
    source = file_hash(order.model)
    model, loss = find_model(order.model, features, task, shape)
    if file_hash(order.model) != source:
        raise BadInput(f"the model file of {order.model} was changed while it was read; give the command again")
    if resume:
        refuse_imports(order.model)
    problem = Problem(model, loss, by_name(order.prox), schema=order.schema.hash if order.schema else "")
    with _own_code(order.model), torch.no_grad():
        problem.outputs(problem.initial([0]), torch.zeros(2, features))
    records = Records(records.x.flatten(2), records.y, records.counts, records.names)
    plan = plan_order(order, records.counts, features)
    ledger = MemoryLedger(plan.rule, plan.budgets.tolist(), records.counts)
    make_folder(folder)
    watch = _Watch(folder, ledger, records.names)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(watch.record))
        (go_on if resume else begin)(folder)
        seed = kept_seed(folder / SEED, order.seed, records)
        coin = int(hashlib.sha256(f"public coin {seed}".encode()).hexdigest()[:7], 16) if order.seed is None else order.seed
        for name, text in (files or {}).items():
            if not (folder / name).exists():
                (folder / name).write_text(text)
        start = problem.initial([coin])
        same = dict(about or {}) | pinned(source, start, plan.mechanisms)
        _write_order(folder, order, plan, problem, records, same)
        stack.enter_context(_ending(folder))

        def connect(records: Records, stage: int) -> tuple[Federation, Transcript]:
            gate = Gate(Simulated(problem, records, [(seed, stage + 1)]), ledger, dim=problem.dim, counts=records.counts)
            channel = Transcript(InProcess(gate), watch.seen)
            return Federation(channel, order.participation() if stage else Everyone(len(records))), channel

        mean, scale = torch.zeros(features, dtype=torch.float64), torch.ones(features, dtype=torch.float64)
        first: Transcript | None = None
        if order.scale == "private":
            fed, first = connect(records, 0)
            mean, scale = learn_scaling(fed, features, ranges=plan.mechanisms["ranges"], moments=plan.mechanisms["moments"])
            scaled = (records.x - mean.float()) / scale.float()
            records = Records(scaled, records.y, records.counts, records.names)
        fed, channel = connect(records, 1)
        mechanisms = {kind: plan.mechanisms[kind] for kind in order.algorithm.kinds}
        run = prepared(order.algorithm, order.settings, order.step)
        w = output(watch.counted(progress(run(fed, problem, start, **mechanisms))), order.output_rule, seed=coin)
        if not bool(torch.isfinite(w).all()):
            raise BadInput(f"training diverged with step {order.step:g}; use a smaller --step (the budget of this run is spent)")
        found = {}
        if held_out is not None:
            found = _score(problem, w, held_out[0].flatten(1), held_out[1], order.classes)
        transcripts = [t for t in (first, channel) if t]
        summary = _write(folder, order, plan, problem, w, mean, scale, ledger, records.names, transcripts, note, found)
        return summary


@contextlib.contextmanager
def _ending(folder: Path) -> Iterator[None]:
    """A run that comes to an end of its own, good or bad, is not resumed: its seed goes. One that is interrupted or killed keeps it."""
    try:
        yield
    except (BadInput, Refused):
        (folder / SEED).unlink(missing_ok=True)
        raise
    (folder / SEED).unlink(missing_ok=True)


def _score(problem: Problem, w: Tensor, x: Tensor, y: Tensor, classes: int) -> dict:
    if not classes:
        return {"test_loss": float(problem.losses(w, x, y).mean())}
    return {"test_error": float(error_rate(problem, w, x, y)), "balanced_accuracy": float(balanced_accuracy(problem, w, x, y))}


class _Watch:
    """Writes progress.jsonl: a line for each question, under the round that it belongs to."""

    def __init__(self, folder: Path, ledger: MemoryLedger, names: Sequence[str]) -> None:
        self.record, self._ledger, self._names = Progress(folder, keep=False), ledger, names
        self._question, self._round = 0, 1

    def seen(self, query: Query, release: Release) -> None:
        used = dict(zip(self._names, np.asarray(self._ledger.used())[0].tolist(), strict=True))
        line = measured(query, release.value[0], release.silos, self._ledger.counts.tolist(), self._names)
        if self._ledger.rule.name != "committed":  # its prices take seconds: a reader then takes the whole budget for spent
            line["epsilon"] = dict(zip(self._names, np.asarray(self._ledger.epsilon())[0].tolist(), strict=True))
        self.record.write(self._question, {"round": self._round, "used": used, "dropped": {}} | line)
        self._question += 1

    def counted(self, iterates: Iterator[Tensor]) -> Iterator[Tensor]:
        for self._round, w in enumerate(iterates, 2):
            yield w


def _write_order(folder: Path, order: Order, plan: Plan, problem: Problem, records: Records, about: dict) -> None:
    """run.json: what is trained, known before the first question; n is public. BadInput if the run there is another.

    Another model, or another version's arithmetic, under the noise of the run before would show where the two differ.
    """
    silos = [
        {"name": name, "records": n, "epsilon": b.epsilon, "delta": b.delta}
        for name, n, b in zip(records.names, records.counts, order.budgets, strict=True)
    ]
    facts = {
        "kind": "train", "algorithm": order.algorithm.name, "settings": order.settings, "step": order.step, "clip": order.clip,
        "sampling": str(order.sampling), "model": Path(order.model).name, "prox": order.prox, "rule": plan.rule.name, "scale": order.scale,
        "output": order.output_rule, "seed": order.seed, "features": records.x.shape[-1], "classes": order.classes,
        "parameters": problem.dim, "silos": silos, "definition": hashlib.sha256(problem.definition().encode()).hexdigest(),
        "anchor_share": order.anchor_share, **about,
    }  # fmt: skip
    path, part = folder / "run.json", folder / "run.json.part"
    if path.exists():
        found, wanted = json.loads(path.read_text()), json.loads(json.dumps(facts))
        if differs := sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k)):
            raise BadInput(
                f"the run in {folder} was begun with another {', '.join(differs)}; restore that, or start another run with --new"
            )
        return
    part.write_text(json.dumps(facts, indent=1) + "\n")
    part.replace(path)


@contextlib.contextmanager
def _own_code(name: str) -> Iterator[None]:
    """Whatever somebody has written there is said in a sentence."""
    try:
        yield
    except Exception as error:
        raise BadInput(f"the model {name} cannot be run ({type(error).__name__}: {' '.join(str(error).split())}); mend it") from None


def find_model(text: str, features: int, task: Task, shape: tuple[int, ...] = ()) -> tuple[nn.Module, Loss]:
    """A ready model by name, or FILE.py:FUNCTION, called with (features, outputs), which returns a torch module."""
    path, colon, function = text.rpartition(":")
    if not (colon and path.endswith(".py")):
        return model_by_name(text, features, task, shape)
    if not Path(path).is_file():
        raise BadInput(f"the model file {path} does not exist; give FILE.py:FUNCTION, or one of linear, logistic, mlp:HIDDEN, cnn")
    outputs, loss = task.head()
    with _own_code(path):
        build = runpy.run_path(path).get(function)
    if not callable(build):
        raise BadInput(f"{path} has no function {function!r}; it should take (features, outputs) and return a torch.nn.Module")
    with _own_code(path):
        model = build(features, outputs)
    if not isinstance(model, nn.Module):
        raise BadInput(f"{function} in {path} returned {type(model).__name__}; it should return a torch.nn.Module")
    return model, loss


def plan_order(order: Order, counts: tuple[int, ...], features: int) -> Plan:
    """The noise of everything that the order will ask, scaling included, as one dry run."""
    algorithm = prepared(order.algorithm, order.settings, order.step)
    mechanisms = {kind: Gaussian(kind, order.clip, 0.0, order.sampling) for kind in order.algorithm.kinds}
    shares = default_shares(order.algorithm, order.settings, order.anchor_share) or dict.fromkeys(order.algorithm.kinds, 1.0)
    if order.scale != "private":
        return calibrate(algorithm, mechanisms, order.budgets, counts, order.participation(), shares=shares, rule=order.rule)
    kinds = ("ranges", "moments")
    mechanisms |= {kind: Gaussian(kind, 1.0, 0.0, FullBatch()) for kind in kinds}
    shares = {kind: share * (1 - SCALING_SHARE) for kind, share in shares.items()} | dict.fromkeys(kinds, SCALING_SHARE / 2)

    def both(fed, problem, w, *, ranges, moments, **rest):
        learn_scaling(fed.everyone(), features, ranges=ranges, moments=moments)
        yield from algorithm(fed, problem, w, **rest)

    return calibrate(both, mechanisms, order.budgets, counts, order.participation(), shares=shares, rule=order.rule)


def _write(folder, order, plan, problem, w, mean, scale, ledger, names, transcripts, note, found) -> dict:
    parameters = {name: value[0].contiguous() for name, value in problem.split(w).items()}
    save_file(
        parameters | {"scaling.mean": mean.float(), "scaling.scale": scale.float()},
        folder / "model.safetensors",
        metadata={"model": order.model, "prox": order.prox, "algorithm": order.algorithm.name}
        | ({"schema": order.schema.text} if order.schema else {}),
    )
    rounds = [{**r, "release": f"{i}/{r['release']}"} for i, t in enumerate(transcripts) for r in t.rounds]
    save_file({f"{i}/{k}": v for i, t in enumerate(transcripts) for k, v in t.values.items()}, folder / "transcript.safetensors")
    (folder / "transcript.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    spent = np.asarray(ledger.epsilon())[0]
    summary = {
        "algorithm": order.algorithm.name,
        "questions": len(rounds),
        "answers": sum(len(r["silos"]) for r in rounds),
        "parameters": problem.dim,
        "rule": plan.rule.name,
        "silos": [
            {"name": name, "epsilon": b.epsilon, "delta": b.delta, "spent_epsilon": float(s)}
            for name, b, s in zip(names, order.budgets, spent, strict=True)
        ],
        "model": str(folder / "model.safetensors"),
        "note": note,
        **found,
    }
    noise = "seeded pseudo-random float noise, " + ("seed from the operating system" if order.seed is None else f"seed {order.seed}")
    write_environment(folder, noise=noise)
    part = folder / "spent.json.part"
    part.write_text(json.dumps(summary, indent=1) + "\n")
    part.replace(folder / "spent.json")  # the last: with it the run counts as finished
    return summary
