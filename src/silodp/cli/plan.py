"""`silodp plan`: what a run would cost, before any data is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli import choose
from silodp.cli.console import dump, out, say, say_advice, show, table
from silodp.cli.options import Json, SchemaFile, takes_order
from silodp.core.errors import BadInput
from silodp.core.figures import ALONE, NO_MU, rounded_up, shown
from silodp.core.problem.task import Task
from silodp.host.extension import load
from silodp.server.order import AUTO, Order

FEATURES = 10
"""Of a record, for advice, where nobody says how many."""


@takes_order("prox", "loss", "feature_map", "output")
def plan(
    order: Order,
    records: Annotated[list[int] | None, typer.Option(help="Records in a silo; once for each silo.")] = None,
    silos: Annotated[int | None, typer.Option(help="Number of silos, if all have the --records given once.")] = None,
    dimension: Annotated[int | None, typer.Option(help="d, number of parameters, for --trust masks or shuffle and the theory.")] = None,
    features: Annotated[int | None, typer.Option(help="Columns of a record, for advice, or to find d by --model.")] = None,
    classes: Annotated[int, typer.Option(help="Classes of the label, for --model and --advise; 0 for a number.")] = 2,
    advise: choose.Advise = False,
    schema: SchemaFile = None,
    write: Annotated[Path | None, typer.Option("--write", help="With --advise: a TOML file for `train --settings`.")] = None,
    as_json: Json = False,
) -> None:
    """Before any data is touched: every kind of release, its noise, and what is spent in total.

    Examples: `silodp plan --algorithm mb-sgd --records 1234 --rounds 50 --epsilon 3` ·
    `silodp plan --records 500 --records 2000 --phase 5` · `silodp plan --noise paper --epsilon 18 --json` ·
    `silodp plan --trust masks --colluding 2 --silos 25 --records 1238 --dimension 3394 --algorithm mb-sgd --rounds 50` ·
    `silodp plan --advise --silos 10 --records 1000 --features 20 --epsilon 1`
    """
    every = _all_records(records or [1000], silos)
    if advise:
        if order.algorithm != AUTO:
            raise BadInput("--advise chooses the algorithm; leave out --algorithm, and options that belong to one")
        return choose.advise(order, choose.facts_for(every, features, classes, schema), write, as_json=as_json)
    from silodp.lab.planning import planned

    advice = None
    if order.algorithm == AUTO:
        from silodp.server.advice import choose as chosen

        facts = choose.facts_for(every, features or FEATURES, classes, schema)
        advice = chosen(order, facts)
        order, features = advice.order, len(facts.kinds)

    if order.model and features and dimension is None and not schema:
        dimension = _parameters(order.model, features, classes)
    answer, algorithm = planned(order, every, dimension=dimension), order.algorithm
    if as_json:
        return dump(answer | ({"advice": advice.words()} if advice else {}))
    if advice:
        say_advice(advice)
    say("Epsilon is for each record: a row, or a person where the schema names one; rows by themselves do not protect people.")
    if order.totals:
        _show_totals(answer, algorithm, order)
        if len(set(every)) > 1:
            say("Silos differ in size: the mean in a total is over records, that under ISRL-DP over silos.")
        return
    for silo in answer["silos"]:
        budget = f"epsilon {rounded_up(silo['epsilon'], 6)}, delta {rounded_up(silo['delta'])}"
        rows = [
            (r["kind"], r["count"], *(f"{r[f]:.5g}" for f in ("sensitivity", "noise_std", "noise_multiplier"))) for r in silo["releases"]
        ]
        title = f"A silo of {silo['records']} records: {algorithm}, {budget}"
        show(table("release|count>|sensitivity>|noise std>|noise multiplier>", rows, title=title))
        say(f"Spends epsilon {shown(silo['spent_epsilon'])} in all ({answer['rule']} rule); {_trade_off(silo['mu'])}.")
    if len(answer["silos"]) > 1 and "mean_noise_std" in answer:
        stds = ", ".join(f"{kind} {std:.5g}" for kind, std in answer["mean_noise_std"].items())
        say(f"Noise std of the mean over a round's silos, weights {answer['weights']}: {stds}.")
    if "refine" in {r["kind"] for r in answer["releases"]}:
        say("Differences are listed at their largest clip, 2 L; their noise shrinks with the move of w at the same price.")
    if "order" in answer:
        settings = ", ".join(f"{name} {value}" for name, value in answer["order"].items() if value is not None)
        say(f"By the theorem: {settings}.")
    if "theory" in answer:
        out.print_json(data=answer["theory"])


def _parameters(model: str, features: int, classes: int) -> int:
    from silodp.core.problem.build import Words, build

    return build(Words(model, Task.plain(classes)), features, load=load).dim


def _trade_off(mu: float | None) -> str:
    """What else than epsilon at this delta is known of the whole run."""
    return f"mu = {shown(mu)}" if mu is not None else NO_MU


def _all_records(records: list[int], silos: int | None) -> tuple[int, ...]:
    if silos is None:
        return tuple(records)
    if silos < 1 or len(records) > 1:
        raise BadInput(
            f"silos is {silos} with {len(records)} --records; give --silos, 1 or more, with --records once, or --records for each"
        )
    return tuple(records) * silos


def _show_totals(answer: dict, algorithm: str, order: Order) -> None:
    """Numerically accounted and proven parameters side by side, for each kind of release."""
    kinds = [("", answer)] if "differences" not in answer else [(", anchors", answer), (", differences", answer["differences"])]
    for name, kind in kinds:
        accounted, proven, bits, noise = kind["parameters"], kind["proven"], kind["bits_per_silo_round"], kind["noise_std"]
        rows = (
            ("levels g", accounted["levels"], proven["levels"]),
            ("noise bits b a record and coordinate", accounted["noise_bits"], proven["noise_bits"]),
            ("p", f"{accounted['p']:g}", f"{proven['p']:g}"),
            *((f"bits a silo and round, {coded}", bits[coded], proven["bits_per_silo_round"].get(coded, "")) for coded in bits),
            ("noise std of the mean", f"{noise[order.trust]:.5g}", f"{proven['noise_std']:.5g}"),
            ("  under ISRL-DP", f"{noise['isrl']:.5g}", ""),
            ("  under central DP", f"{noise['central']:.5g}", ""),
        )
        show(table("|accounted>|proven>", rows, title=f"{order.trust.capitalize()}: {algorithm}{name}"))
        say(f"g / sqrt(d) = {accounted['levels_per_sqrt_d']:.3g}.")
    server, alone = answer["epsilon"].values()
    local = "no bounded epsilon" if alone is None else shown(alone)
    whom = "the server" + (f" with at most {order.colluding} colluding silos" if order.trust == "masks" else "")
    verified = "" if order.trust == "masks" else ", which no gate can verify"
    say(
        f"Spends epsilon {shown(server)} at delta {rounded_up(answer['delta'])} against {whom}, and {local} {ALONE[order.trust]} "
        f"(at the smallest silo){verified}."
    )
    if "differences" in answer:
        say("Differences are listed at their largest clip, 2 L; their noise shrinks with the move of w at the same price.")
    if "theory" in answer:
        out.print_json(data=answer["theory"])
