"""Show a ledger to people: its rule by name, epsilon spent and left, open holds, every charge."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput

if TYPE_CHECKING:
    from silodp.core.privacy.accounting import Budget, Rule
    from silodp.silo.ledger.durable import DurableLedger


def rule_by_name(name: str, schedule: Iterable[str], budget: Budget) -> Rule:
    """Return the rule of this name. Raise BadInput if it and the schedule do not fit."""
    from silodp.core.privacy.accounting import GDP, Committed, Renyi

    kind, _, order = name.partition(":")
    events = tuple(_release(text) for text in schedule)
    if bool(events) != (kind == "committed"):
        raise BadInput(
            f"--schedule is given {len(events)} times, but the rule is {kind}; the "
            "committed rule needs a schedule, the others take none"
        )
    match kind, order:
        case "gdp", "":
            return GDP()
        case "renyi", "":
            return Renyi.for_gaussian(budget)
        case "renyi", _:
            return Renyi(_number("--rule", name, order))
        case "committed", "":
            return Committed(events)
    raise BadInput(f"--rule is {name!r}; it must be gdp, renyi, renyi:ORDER or committed")


def _release(text: str) -> Any:
    """Return the event in a --schedule option. Raise BadInput if it is malformed."""
    from silodp.core.events import Event
    from silodp.core.sampling import FullBatch, Poisson

    match text.split(":"):
        case ["full", noise, count]:
            sampling = FullBatch()
        case ["poisson", rate, noise, count]:
            sampling = Poisson(_number("--schedule", text, rate))
            if not 0 < sampling.rate <= 1:
                raise BadInput(f"--schedule is {text!r}; a rate must be between 0 and 1")
        case _:
            raise BadInput(
                f"--schedule is {text!r}; it must be full:NOISE_MULTIPLIER:COUNT or "
                "poisson:RATE:NOISE_MULTIPLIER:COUNT"
            )
    times = _number("--schedule", text, count)
    if times != int(times):
        raise BadInput(f"--schedule is {text!r}; a count must be a whole number")
    return Event(sampling, _number("--schedule", text, noise), int(times))


def _number(option: str, text: str, part: str) -> float:
    """Return the number in a part of an option. Raise BadInput unless it is greater than 0."""
    try:
        value = float(part)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BadInput(f"{option} is {text!r}; {part!r} must be a number greater than 0")
    return value


def summary_of(opened: DurableLedger) -> dict[str, Any]:
    """Return a ledger's settings, sums, heads and holds as data."""
    settings = opened.settings
    count, head = opened.head()
    used = opened.used()
    spent = opened.spent()
    released_count, released_head = opened.released()
    summary = {
        "ledger": str(opened.path),
        "anchor": str(opened.anchor),
        "rule": settings.rule.name,
        "epsilon": settings.budget.epsilon,
        "delta": settings.budget.delta,
        "records": opened.records,
        "created": settings.created,
        "spent_epsilon": spent,
        "left_epsilon": max(0.0, settings.budget.epsilon - spent),
        "used": used,
        "count": count,
        "head": head,
        "released_count": released_count,
        "released_head": released_head,
        "holds": holds_of(opened),
        "closed": opened.closed,
    }
    local = opened.local()
    if local is not None:
        summary["local_epsilon"] = local if math.isfinite(local) else None
    return summary


def said_of(summary: dict[str, Any]) -> str:
    """Return a sentence about what is spent, of what and against whom.

    Its one figure is the one that plan, run and report show.
    """
    from silodp.core.figures import rounded_up, shown, used_of

    spent = (
        f"{used_of(summary['used'])}: epsilon {shown(summary['spent_epsilon'])} of "
        f"{summary['epsilon']:g}"
    )
    conditions = (
        f"delta {rounded_up(summary['delta'])}, {summary['rule']} rule, {summary['records']} "
        "records"
    )
    if "local_epsilon" not in summary:
        return f"{spent} ({conditions})."
    if summary["local_epsilon"] is not None:
        local = f"epsilon {shown(summary['local_epsilon'])}"
    else:
        local = "no bound"
    return (
        f"{spent} against the server, which sees totals ({conditions}). Against an observer of "
        "this silo's own numbers (the shuffler itself, or under masks all other silos and "
        f"the server together): {local}."
    )


def holds_of(opened: DurableLedger) -> list[dict[str, Any]]:
    """Return the open holds that still reserve something.

    Each has its asker, its run, its share of the budget and its remaining seconds. A hold whose run
    was charged all of it stays open until the run's end reaches the gate, and reserves nothing.
    """
    from silodp.silo.ledger.holds import HELD_SLACK
    from silodp.silo.ledger.reserve import listed

    return [
        {
            "id": o.hold.id,
            "run": o.hold.run,
            "asker": o.hold.asker,
            "time": o.hold.time,
            "share": o.share,
            "seconds": o.seconds,
        }
        for o in listed(opened)
        if o.share > HELD_SLACK
    ]


def queries_of(opened: DurableLedger) -> list[dict[str, Any]]:
    """Return every charge in the order of the ledger.

    Each has its cost, and what was left after it, as shares of the budget.
    """
    capacity = opened.capacity
    entries = list(opened.entries())
    fate = {
        e.query_id: {"answer": "kept", "purge": "purged"}[e.act]
        for e in entries
        if e.act in ("answer", "purge")
    }
    before = 0.0
    queries = []
    for e in entries:
        if e.act == "charge":
            queries.append(
                {
                    "entry": e.sequence,
                    "time": e.time,
                    "asker": e.asker,
                    "run": e.run,
                    "kind": e.kind,
                    "query_id": e.query_id,
                    "event": json.loads(e.event),
                    "cost": (e.total - before) / capacity,
                    "left": 1 - e.total / capacity,
                    "answer": fate.get(e.query_id, "not yet"),
                }
            )
            before = e.total
    return queries
