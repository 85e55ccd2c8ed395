"""`silodp evaluate` and `silodp stats profile` in simulation: all silos in one process, each paying
for its answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.privacy.accounting import GDP, Budget, added
from silodp.core.problem.build import Words, build
from silodp.core.problem.person import unit
from silodp.core.problem.problem import Problem
from silodp.core.problem.task import Task
from silodp.core.sampling import FullBatch
from silodp.core.weights import Weights
from silodp.host import atomic
from silodp.host.extension import load
from silodp.runs import Kind, RunFolder
from silodp.server.estimates.columns import chosen, columns_by_group
from silodp.server.estimates.grids import grids_of
from silodp.server.estimates.groups import groups_of
from silodp.server.estimates.logrank import logrank, two_groups
from silodp.server.estimates.profile import profile, releases
from silodp.server.estimates.regression import answer as regression
from silodp.server.estimates.regression import model_of, planned
from silodp.server.estimates.scoring import gaussian_for
from silodp.server.estimates.survival import survival, survival_label
from silodp.server.estimates.synthetic import synthesise
from silodp.server.evaluation import Evaluation, Judged, Wanted, expectation, forecast
from silodp.server.federation import Everyone, Federation
from silodp.server.folder import read_run
from silodp.server.order import (
    MODEL,
    Order,
    budgets_of,
    check_seed,
    least_of_all,
    with_default_delta,
)
from silodp.server.releases import ReleaseList
from silodp.silo.data.heldout import split_records
from silodp.silo.data.records import Records
from silodp.silo.ledger.memory import MemoryLedger
from silodp.simulation.connect import connect
from silodp.simulation.hidden import check_mark, places_key
from silodp.simulation.planning import warn_of_delta
from silodp.simulation.runfolder import locked
from silodp.simulation.source import Source
from silodp.simulation.training import mapped, read_back, words_of

NOISE = "seeded pseudo-random float noise, for simulation"


def evaluate_run(
    folder: Path,
    *,
    epsilon: str | None,
    wanted: Wanted | None = None,
    seed: int | None = None,
    source: Source | None = None,
    by: str | None = None,
    on_expectation: Callable[[dict[str, Any]], None] | None = None,
) -> dict:
    """Scores the run's model on its held-out records, adds the price to what the run has spent, and
    writes evaluations.jsonl and the result. Without an `epsilon` nothing is asked and nothing is
    spent: the answer has the expected precision at several prices, and a proposed one.

    The price is added, not shared: no record is claimed to have been in one part only. `source` has
    the records, where they are in no file. With `by`, a column of the schema, accuracies of its
    groups are asked for too, within the same price. `on_expectation` is called with the expected
    precision before anything is spent.
    """
    check_seed(seed)
    with locked(
        folder
        # from what was spent to the answer: two at once would each add to the same sum, and draw
        # the same noise
    ):
        return _evaluate(folder, epsilon, wanted or Wanted(), seed, source, by, on_expectation)


def _evaluate(
    folder: Path,
    epsilon: str | None,
    wanted: Wanted,
    seed: int | None,
    given: Source | None,
    by: str | None,
    on_expectation: Callable[[dict[str, Any]], None] | None,
) -> dict:
    spent, (order, source) = (
        spent_of(folder),
        (Order.read(read_run(folder), folder), given) if given else read_back(folder),
    )
    files = RunFolder(folder)
    files.seed.unlink(missing_ok=True)  # it was killed between its end and that
    with _writing(folder):  # before anything is asked
        part = files.result.with_name(f"{files.result.name}.part")
        part.touch()
        part.unlink()
        if files.evaluations.exists():
            open(files.evaluations, "a", encoding="utf-8").close()
    if not source.held_out:
        raise BadInput(
            f"the run in {folder} has held nothing out; train with --held-out 0.2 to "
            "evaluate on records it has not seen"
        )
    if by is not None:
        groups = groups_of(source.read_by, by, feature_map=order.feature_map)
    else:
        groups = None
    loaded = source.load(order.coins, raw=bool(order.feature_map))
    records = loaded.records
    classes = loaded.classes
    if [s["name"] for s in spent["silos"]] != list(records.names):
        raise BadInput(
            f"the data of the run in {folder} have other silos now; evaluate on the files "
            "that it was trained on"
        )
    check_mark(folder, records)
    _, held = split_records(records, source.held_out, places_key(order.seed))
    held = mapped(held, order, source, load)
    problem, w, mean, scale = _model(
        folder, order, source, records.features, held.x.shape[-1], classes
    )
    if groups and not (bool((mean == 0).all()) and bool((scale == 1).all())):
        raise BadInput(
            f"--by is {by!r}, but the run in {folder} scales what the schema makes of a "
            "column; leave it out"
        )
    held = Records((held.x - mean) / scale, held.y, held.counts, held.names)
    if source.read_by:
        label = source.read_by.label
    else:
        label = None
    judged = Judged(classes, label, problem.loss, spent, read_run(folder)["silos"])

    def at(price: str) -> Evaluation:
        return Evaluation.of(
            judged,
            wanted,
            names=held.names,
            held_out=held.counts,
            budgets=_budgets(replace(order, epsilon=(price,)), records),
            groups=groups,
            **_trusted(order, held),
        )

    if epsilon is None:
        return forecast(lambda price: at(f"{price:g}"))
    evaluation = at(epsilon)
    if on_expectation:
        on_expectation(expectation(evaluation))
    asked = evaluation.asked
    budgets = list(evaluation.budgets)
    if files.evaluations.exists():
        before = files.evaluations.read_text("utf-8").splitlines()
    else:
        before = ()
    question = f"{evaluation.edges} {asked.cap!r}{f' by {by}' if groups else ''}"
    purpose = f"evaluate {len(before)} {question}"
    fed, ledger = _connected(order, problem, held, budgets, seed, purpose)
    found = evaluation.run(w, lambda question: fed)
    paid = _paid(ledger, held.names, budgets)
    answer = {
        "silos": paid,
        "cap": asked.cap,
        "cut": asked.cut,
        "bins": asked.cells,
        "noise": NOISE,
        "trust": order.trust,
    } | found
    _add_up(spent, paid)
    if any(math.isinf(s["in_all"]["epsilon"]) for s in spent["silos"]):
        raise BadInput(
            "with this evaluation the run would have spent an epsilon too large to tell "
            "from infinite; ask for a smaller --epsilon"
        )
    with _writing(folder):
        atomic.write_json(files.result, spent)  # the price first: no answer is kept unpaid
        with open(files.evaluations, "a", encoding="utf-8") as file:
            file.write(json.dumps(answer) + "\n")
    return answer | {
        "training": [{"epsilon": s["spent_epsilon"], "delta": s["delta"]} for s in spent["silos"]],
        "evaluations": [s.get("evaluations") for s in spent["silos"]],
        "in_all": [s["in_all"] for s in spent["silos"]],
    }


def _trusted(order: Order, records: Records) -> dict[str, Any]:
    """Return what a mechanism follows from under the order's trust."""
    return {"trust": order.trust, "counted": len(records) - order.colluding}


def profile_data(order: Order, source: Source) -> dict:
    """Return a profile of the silos' own files or of a built-in set, within the order's budgets."""
    loaded = replace(source, scale="none").load(order.coins, holes=True)
    names = loaded.features or tuple(f"f{j}" for j in range(loaded.records.features))
    if source.read_by:
        labels = source.read_by.label.classes
    else:
        labels = tuple(source.class_names(loaded.classes))

    def ask(fed: Federation, budgets: list[Budget]) -> dict:
        questions = releases(names, labels, source.read_by)
        mechanism = gaussian_for("profile", budgets, questions, **_trusted(order, loaded.records))
        return profile(
            fed,
            mechanism,
            features=names,
            classes=labels,
            counts=loaded.records.counts,
            schema=source.read_by,
        )

    return _asked("profile", order, source, loaded.records, ask)


def survival_data(order: Order, source: Source) -> dict:
    """Return the survival curve of the silos' own files, within the order's budgets."""
    label = survival_label(source.read_by.label if source.read_by else None)
    records = source.load(order.coins).records
    return _asked(
        "survival",
        order,
        source,
        records,
        lambda fed, b: survival(
            fed, gaussian_for("survival", b, **_trusted(order, records)), label, records.counts
        ),
    )


def columns_data(
    order: Order,
    source: Source,
    by: str | None = None,
    columns: Sequence[str] = (),
    *,
    numbers: bool = False,
) -> dict:
    """Return the columns of the silos' own files by group, within the order's budgets.

    With `numbers` only columns that are numbers.
    """
    names = chosen(source.read_by, by, columns, numbers=numbers)
    records = source.load(order.coins).records

    def ask(fed: Federation, budgets: list[Budget]) -> dict:
        mechanism = gaussian_for("columns", budgets, **_trusted(order, records))
        return columns_by_group(fed, mechanism, source.read_by, names, by, records.counts)

    return _asked(f"columns {by!r} {names!r}", order, source, records, ask)


def synthetic_data(order: Order, source: Source, rows: int) -> dict:
    """Return a synthetic table of the silos' own files, within the order's budgets."""
    schema = source.read_by
    grids_of(schema, 2)
    assert schema is not None
    records = source.load(order.coins).records

    def ask(fed: Federation, budgets: list[Budget]) -> dict:
        mechanism = gaussian_for("synthesise", budgets, **_trusted(order, records))
        return synthesise(fed, mechanism, schema, rows, records.counts)

    return _asked("synthesise", order, source, records, ask)


def estimate_data(
    order: Order, source: Source, columns: Sequence[str] = (), *, strata: bool = False
) -> dict:
    """Return a logistic, Poisson or Cox regression of the silos' own files, within the order's
    budgets.
    """
    model = model_of(source.read_by, columns, strata=strata, trust=order.trust)
    records = source.load(order.coins).records

    def ask(fed: Federation, budgets: list[Budget]) -> dict:
        mechanism = gaussian_for(model.name, budgets, **_trusted(order, records))
        return regression(fed, mechanism, model, records.counts)

    return _asked(f"estimate {model!r}", order, source, records, ask)


def plan_estimate(
    order: Order, source: Source, columns: Sequence[str] = (), *, strata: bool = False
) -> dict:
    """Return the price and the expected precision of `estimate_data`, without an answer."""
    model = model_of(source.read_by, columns, strata=strata, trust=order.trust)
    records = source.load(order.coins).records
    budgets = _budgets(order, records)
    mechanism = gaussian_for(model.name, budgets, **_trusted(order, records))
    silos = [{"name": n, **asdict(b)} for n, b in zip(records.names, budgets, strict=True)]
    return planned(mechanism, model, records.counts) | {"silos": silos}


def logrank_data(order: Order, source: Source, by: str) -> dict:
    """Return the log-rank test between two groups of the silos' own files, within the order's
    budgets.
    """
    label, groups = two_groups(source.read_by, by)
    records = source.load(order.coins).records

    def ask(fed: Federation, budgets: list[Budget]) -> dict:
        mechanism = gaussian_for("logrank", budgets, **_trusted(order, records))
        return logrank(fed, mechanism, label, groups, records.counts)

    return _asked(f"logrank {by}", order, source, records, ask)


def _asked(
    purpose: str,
    order: Order,
    source: Source,
    records: Records,
    ask: Callable[[Federation, list[Budget]], dict],
) -> dict:
    """Return what these records are asked within the order's budgets, and what each silo has paid
    for it.
    """
    budgets = _budgets(order, records)
    problem = build(
        Words("linear", Task.plain(0)), records.features, load=load
    )  # a gate has a model even where nobody asks about it
    if source.read_by:
        problem.person = source.read_by.person
    else:
        problem.person = None
    # Everything that changes the question or the size of the noise belongs to the purpose.
    facts = order.trust, order.colluding, source.read_by, records.names, records.counts
    fed, ledger = _connected(order, problem, records, budgets, order.seed, f"{purpose} {facts!r}")
    fed.record = released = ReleaseList(records.names)
    found = ask(fed, budgets)
    warn_of_delta(with_default_delta(order, records.names, records.counts))
    return found | {
        "silos": _paid(ledger, records.names, budgets),
        "trust": order.trust,
        "noise": NOISE,
        "unit": unit(problem.person),
        "seed": order.seed,
        "releases": released.found,
    }


def _budgets(order: Order, records: Records) -> list[Budget]:
    """Return what each silo pays, for a record or, if the order is so, for a whole silo: in totals
    the least of all. A curator's training is evaluated without one.
    """
    if not order.totals:
        order = order.under("isrl")
    budgets = budgets_of(order, records.names, records.counts, {"": FullBatch()})
    if order.totals:
        return [least_of_all(budgets)] * len(budgets)
    return budgets


def _connected(
    order: Order,
    problem: Problem,
    records: Records,
    budgets: list[Budget],
    seed: int | None,
    purpose: str,
) -> tuple[Federation, MemoryLedger]:
    """Return a federation over these records and its ledger. One seed has another noise for every
    purpose and budget: if two answers had the same noise, their difference would have none.
    """
    ledger = MemoryLedger(GDP(), budgets, records.counts)
    seeds = [_coins(seed, f"{purpose} {budgets!r}")]
    trust = order.trust if order.totals else "isrl"
    weights = Weights("records" if order.totals else "equal", records.counts)
    everyone = Everyone(len(records))
    fed = connect(
        trust, problem, records, ledger, seeds, everyone, weights, colluding=order.colluding
    )
    return fed, ledger


def _coins(seed: int | None, asked: str) -> tuple[int, ...]:
    return (
        secrets.randbits(128) if seed is None else seed,
        0x5C02E,
        int.from_bytes(hashlib.sha256(asked.encode()).digest(), "big"),
    )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"the run folder {folder} cannot be written ({error.strerror}), and an "
            "evaluation adds its price there; make it writable"
        ) from None


def spent_of(folder: Path) -> dict:
    """Return what the run has cost so far; there is none before its end."""
    files = RunFolder(folder)
    try:
        if files.kind() is not Kind.TRAINING:
            raise FileNotFoundError
        found = json.loads(files.result.read_text())
        parts = [
            (s, *(s.get(part, {}) for part in ("in_all", "evaluations"))) for s in found["silos"]
        ]
        spent = [
            (
                s["name"],
                float(s["spent_epsilon"]),
                float(s["delta"]),
                *(float(v) for sum_ in sums for v in sum_.values()),
            )
            for s, *sums in parts
        ]
        if not spent or not isinstance(found["rule"], str):
            raise ValueError
    except FileNotFoundError:
        raise BadInput(
            f"{folder} holds no run of `silodp train` that is finished: it has no "
            "summary.json; train again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"{files.result} is not as `silodp train` wrote it, so what was spent is "
            "not known; restore it"
        ) from None
    return found


def _model(
    folder: Path, order: Order, source: Source, raw: int, features: int, classes: int
) -> tuple[Problem, Tensor, Tensor, Tensor]:
    problem = build(words_of(order, source, classes), raw, load=load)
    model = order.model or MODEL
    try:
        with safe_open(RunFolder(folder).model, "pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
        w = torch.cat(
            [stored[name].reshape(shape).flatten() for name, shape in problem.shapes.items()]
        )[None]
        mean, scale = (stored[name].reshape(features) for name in ("scaling.mean", "scaling.scale"))
    except (OSError, KeyError, RuntimeError, SafetensorError):
        raise BadInput(
            f"{folder}/model.safetensors is not the model {model} of this run; restore it"
        ) from None
    return problem, w, mean, scale


def _paid(ledger: MemoryLedger, names: tuple[str, ...], budgets: list[Budget]) -> list[dict]:
    spent = np.asarray(ledger.epsilon())[0]
    return [
        {"name": n, **asdict(b), "spent_epsilon": float(s)}
        for n, b, s in zip(names, budgets, spent, strict=True)
    ]


def _add_up(spent: dict, paid: list[dict]) -> None:
    """Return what all evaluations cost, and training and evaluations together: exactly where the
    training is priced by the gdp rule, as evaluations are, else by adding epsilons and deltas.
    """
    for silo, now in zip(spent["silos"], paid, strict=True):
        price = {"epsilon": now["spent_epsilon"], "delta": now["delta"]}
        training = {"epsilon": silo["spent_epsilon"], "delta": silo["delta"]}
        before = silo.get("evaluations")
        if (
            before or "in_all" not in silo
        ):  # else an earlier version has left a sum without its parts
            if before:
                own = _both(before, price, gaussian=spent["rule"] != "totals")
            else:
                own = price
            silo["evaluations"] = {"count": before["count"] + 1 if before else 1, **own}
        silo["in_all"] = _both(silo.get("in_all", training), price, gaussian=spent["rule"] == "gdp")


def _both(one: dict, other: dict, *, gaussian: bool) -> dict:
    """(epsilon, delta) of two parts."""
    epsilon, delta = added(
        [(part["epsilon"], part["delta"]) for part in (one, other)], gaussian=gaussian
    )
    return {"epsilon": epsilon, "delta": delta}
