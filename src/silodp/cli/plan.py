"""`silodp plan`: what a run would cost, before any data is touched, or with --advise what to
run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import dump, out, say, say_advice, show, table
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Json, SchemaFile, takes_order
from silodp.core.errors import BadInput
from silodp.core.figures import ALONE, NO_MU, rounded_up, shown
from silodp.core.problem.task import Task
from silodp.host import atomic
from silodp.host.extension import load
from silodp.host.schema import load_schema
from silodp.server.order import AUTO, Order

FEATURES = 10
"""Number of columns for advice, if --features is not given."""
WORDS = {
    "isrl": "no party is trusted: each message is private when it leaves its silo",
    "masks": (
        "the other silos are trusted to add their noise, all but --colluding of them. No party "
        "sees what one silo sends"
    ),
    "shuffle": (
        "a shuffler is trusted: alone, or with the server, it sees more than this epsilon "
        "allows, and no gate can verify it"
    ),
    "central": (
        "the server is trusted with the records themselves: epsilon holds against readers of "
        "the model only"
    ),
}


@takes_order("prox", "loss", "feature_map", "output")
def plan(
    order: Order,
    records: Annotated[
        list[int] | None, typer.Option(help="Records in a silo; once for each silo.")
    ] = None,
    silos: Annotated[
        int | None, typer.Option(help="Number of silos, if all have the --records given once.")
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(help="d, number of parameters, for --trust masks or shuffle and the theory."),
    ] = None,
    features: Annotated[
        int | None, typer.Option(help="Columns of a record, for advice, or to find d by --model.")
    ] = None,
    classes: Annotated[
        int, typer.Option(help="Classes of the label, for --model and --advise; 0 for a number.")
    ] = 2,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help=(
                "Recommend model, algorithm, settings and trust, and show the expected error, by "
                "simulation on made-up records."
            ),
        ),
    ] = False,
    schema: SchemaFile = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="With --advise: a TOML file for `train --settings`."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show every kind of release, its noise and the total price, before any data is touched.

    Examples: `silodp plan --algorithm mb-sgd --records 1234 --rounds 50 --epsilon 3` · `silodp plan
    --records 500 --records 2000 --phase 5` · `silodp plan --noise paper --epsilon 18 --json` ·
    `silodp plan --trust masks --colluding 2 --silos 25 --records 1238 --dimension 3394 --algorithm
    mb-sgd --rounds 50` · `silodp plan --advise --silos 10 --records 1000 --features 20 --epsilon 1`
    """
    every = _all_records(records or [1000], silos)
    if advise:
        if order.algorithm != AUTO:
            raise BadInput(
                "--advise chooses the algorithm; leave out --algorithm, and options that "
                "belong to one"
            )
        return _advise(order, _facts(every, features, classes, schema), write, as_json=as_json)
    from silodp.simulation.planning import planned

    advice = None
    if order.algorithm == AUTO:
        from silodp.server.advice import choose as chosen

        facts = _facts(every, features or FEATURES, classes, schema)
        advice = chosen(order, facts)
        order = advice.order
        features = len(facts.kinds)
    if order.model and features and dimension is None and not schema:
        from silodp.core.problem.build import Words, build

        dimension = build(Words(order.model, Task.plain(classes)), features, load=load).dim
    answer = planned(order, every, dimension=dimension)
    if as_json:
        return dump(answer | ({"advice": advice.words()} if advice else {}))
    if advice:
        say_advice(advice)
    say(
        "Epsilon protects each record: a row, or a person with all rows if the schema names a "
        "person column."
    )
    if order.totals:
        _show_totals(answer, order)
    else:
        _show_silos(answer, order.algorithm)
    if "refine" in {r["kind"] for r in answer["releases"]}:
        say(
            "Differences are listed at their largest clip, 2 L. Their noise shrinks with "
            "the move of w, at the same price."
        )
    if "order" in answer and not order.totals:
        settings = ", ".join(
            f"{name} {value}" for name, value in answer["order"].items() if value is not None
        )
        say(f"By the theorem: {settings}.")
    if "theory" in answer:
        out.print_json(data=answer["theory"], ensure_ascii=True)
    if order.totals and len(set(every)) > 1:
        say(
            "Silos differ in size. A total gives the mean over records, and ISRL-DP the mean "
            "over silos."
        )


def _show_silos(answer: dict, algorithm: str) -> None:
    """Print every kind of release of each silo, and what it spends."""
    for silo in answer["silos"]:
        budget = f"epsilon {rounded_up(silo['epsilon'], 6)}, delta {rounded_up(silo['delta'])}"
        rows = [
            (
                r["kind"],
                r["count"],
                *(f"{r[f]:.5g}" for f in ("sensitivity", "noise_std", "noise_multiplier")),
            )
            for r in silo["releases"]
        ]
        title = f"A silo of {silo['records']} records: {algorithm}, {budget}"
        show(table("release|count>|sensitivity>|noise std>|noise multiplier>", rows, title=title))
        if silo["mu"] is not None:
            known = f"mu = {shown(silo['mu'])}"
        else:
            known = NO_MU
        say(
            f"Spends epsilon {shown(silo['spent_epsilon'])} in all ({answer['rule']} "
            f"rule); {known}."
        )
    if len(answer["silos"]) > 1 and "mean_noise_std" in answer:
        stds = ", ".join(f"{kind} {std:.5g}" for kind, std in answer["mean_noise_std"].items())
        say(f"Noise std of the mean over a round's silos, weights {answer['weights']}: {stds}.")


def _all_records(records: list[int], silos: int | None) -> tuple[int, ...]:
    if silos is None:
        return tuple(records)
    if silos < 1 or len(records) > 1:
        raise BadInput(
            f"silos is {silos} with {len(records)} --records; give --silos, 1 or more, "
            "with --records once, or --records for each"
        )
    return tuple(records) * silos


def _show_totals(answer: dict, order: Order) -> None:
    """Print the noise of each kind of release, beside that of the other trusts."""
    for kind in answer["releases"]:
        share = kind["parameters"]
        noise = kind["noise_std"]
        rows = [
            ("releases", f"{kind['count']}"),
            ("noise multiplier of each silo's share", f"{share['noise_multiplier']:.5g}"),
            ("shares that the price counts on", f"{share['counted']}"),
            ("noise std of the mean", f"{noise[order.trust]:.5g}"),
            ("  under ISRL-DP", f"{noise['isrl']:.5g}"),
            ("  under central DP", f"{noise['central']:.5g}"),
        ]
        if "bits_per_silo_round" in kind:
            rows.append(("bits a silo and round", f"{kind['bits_per_silo_round']}"))
        title = f"{order.trust.capitalize()}: {order.algorithm}, {kind['kind']}"
        show(table("|value>", rows, title=title))
    server, alone = answer["epsilon"].values()
    if alone is None:
        local = "no bounded epsilon"
    else:
        local = shown(alone)
    whom = "the server"
    if order.trust == "masks" or order.colluding:
        whom += f" with at most {order.colluding} colluding silos"
    if order.trust == "masks":
        verified = ""
    else:
        verified = ", which no gate can verify"
    say(
        f"Spends epsilon {shown(server)} at delta {rounded_up(answer['delta'])} against "
        f"{whom}, and {local} {ALONE[order.trust]} "
        f"(at the smallest silo){verified}."
    )


# --- plan --advise -------------------------------------------------------------------------------


def _facts(
    records: tuple[int, ...], features: int | None, classes: int, schema: Path | None
) -> Any:
    """What `plan` knows of the silos, without their files: columns by the schema, else a mixture of
    kinds.
    """
    from silodp.server.advice import Facts, kinds_of
    from silodp.simulation.planning import named

    if schema:
        task = load_schema(schema)
        return Facts(named(records), records, kinds_of(task, len(task.features)), task)
    if features is None:
        raise BadInput(
            "features is missing; advice needs --features, the number of features of a "
            "record, or --schema"
        )
    if features < 1 or classes < 0 or classes == 1:
        raise BadInput(
            f"there are {features} features and {classes} classes; give 1 feature or more, "
            "and 0 classes for a number, or 2 or more"
        )
    mixed = tuple(("number", "category", "boolean")[i % 3] for i in range(features))
    return Facts(named(records), records, mixed, Task.plain(classes))


def _advise(order: Order, facts: Any, write: Path | None, *, as_json: bool) -> None:
    """Prints the advice, and writes the settings of the order's own trust; reads no record."""
    from silodp.server.advice.trusts import compared
    from silodp.server.advice.words import settings_file

    with interruptible("no record was read, and nothing is kept"):
        answer = compared(order, facts)
    if write:
        chosen = answer["trusts"][answer["advised"] or order.trust]["order"]
        atomic.write(write, settings_file(Order.read({"order": chosen}, write)), mode=0o644)
        answer["settings"] = str(write)
    dump(answer) if as_json else _show_advice(answer)


def _show_advice(answer: dict[str, Any]) -> None:
    entries = [e for e in answer["trusts"].values() if "refused" not in e]
    settings = ("model", "algorithm", "rounds", "clip", "step")
    columns = "|".join(
        [
            "trust!",
            *(k if k in ("model", "algorithm") else f"{k}>" for k in settings),
            "error>!",
            "no privacy>",
            "guessing>",
        ]
    )
    rows = (
        (
            e["trust"],
            *(v if isinstance(v := e["order"][k], str) else f"{v:.3g}" for k in settings),
            f"{100 * e['expected']['error']:.1f} ± {100 * e['expected']['run_to_run']:.1f} %",
            *(f"{100 * e['expected'][k]:.1f} %" for k in ("not_private", "guessing")),
        )
        for e in entries
    )
    show(table(columns, rows, title="Expected on simulated records"))
    for trust, entry in answer["trusts"].items():
        if "refused" in entry:
            say(f"Trust {trust} has no plan for this: {entry['refused']}.")
        elif not entry["expected"]["enough"]:
            say(
                (
                    f"Not enough records for this epsilon with trust {trust}: the model would "
                    "be no better than guessing."
                ),
                style="red",
            )
        if needed := entry.get("needed"):
            if needed["records"]:
                few = f"{min(needed['records'])} to {max(needed['records'])}"
            else:
                few = ""
            ways = [f"about {few} records a silo at this epsilon"] * bool(few)
            ways += [
                f"about epsilon {needed['epsilon']:.2g} with the records that there are"
            ] * bool(needed["epsilon"])
            none = "Not even 1,000 times as many records, or epsilon 50, would be enough."
            say(f"  Enough would be {', or '.join(ways)}." if ways else f"  {none}")
    if trust := answer["advised"]:
        say(f"Advice: trust {trust} ({WORDS[trust]}).", *answer["trusts"][trust]["lines"])
    else:
        say(
            "Advice: do not train on these records at this epsilon, with any kind of trust. "
            "The budget would be wasted."
        )
    for silo in answer["gives_up"]:
        say(
            f"A silo of {silo['records']} records spends epsilon {silo['epsilon']:g}, "
            f"delta {rounded_up(silo['delta'])} (mu = {shown(silo['mu'])}). An attacker who "
            "knows all other records and two candidates for this one picks the right one in at "
            f"most {100 * silo['guesses_right']:.1f} % of cases (a coin: 50 %). At "
            f"{100 * silo['false_positives']:g} % false alarms the attacker detects at most "
            f"{100 * silo['true_positives']:.1f} %. The attacker becomes more than "
            f"{100 * silo['belief']:.1f} % certain with probability "
            f"{silo['belief_passed']:.1g} at most."
        )
    if "settings" in answer:
        say(
            f"Settings: {answer['settings']}; `silodp train --settings` and `silodp "
            "federation run --settings` use them."
        )
