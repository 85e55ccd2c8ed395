"""`silodp stats estimate` and `silodp stats logrank`, and the same over a federation: odds ratios,
rate ratios and hazard ratios with intervals, and a test between two groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, dump, say, show, table
from silodp.cli.federation import Folder
from silodp.cli.interrupted import interruptible
from silodp.cli.recorded import Recorder, RecordIn, of_federation
from silodp.cli.score import (
    NOTHING,
    Charge,
    Colluding,
    Deadline,
    Delta,
    Pays,
    Seed,
    Trust,
    cards_of,
    once,
    one_question,
    plan_once,
    tell,
)
from silodp.cli.score_tables import show_estimate, show_logrank, show_plan
from silodp.core.errors import BadInput
from silodp.host.cards import schema_of

Schema = Annotated[
    Path | None,
    typer.Option(help="The public schema of the files, in TOML. Its label decides the model."),
]
Silo = Annotated[
    list[Path] | None, typer.Option(help="One CSV, Parquet or NPZ file for each silo.")
]
Columns = Annotated[
    str | None,
    typer.Option(help="The columns of the model, separated by commas; by default all."),
]
Strata = Annotated[
    str | None,
    typer.Option(help="silo: give each silo its own level, or its own hazard over time."),
]
Plan = Annotated[
    bool, typer.Option("--plan", help="Print price and expected precision, and ask nothing.")
]
Page = Annotated[
    Path | None,
    typer.Option("--page", help="Also draw the ratios on a page of its own, such as ratios.html."),
]
By = Annotated[
    str, typer.Option("--by", help="A boolean column of the schema, or a category of two.")
]


def estimate(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="The folder of a run of --algorithm one-shot, instead of files.",
            show_default=False,
        ),
    ] = None,
    schema: Schema = None,
    silo: Silo = None,
    columns: Columns = None,
    strata: Strata = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    plan: Plan = False,
    page: Page = None,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """Odds ratios, rate ratios or hazard ratios with 95 % intervals and p-values that include the
    privacy noise.

    The schema's label decides the model: two classes are fitted by logistic regression, counts by
    Poisson regression, and survival times by Cox regression. The first category of a column is the
    reference.

    With RUN: the coefficients of a linear regression that is already paid for. They cost nothing.

    Example: `silodp stats estimate --schema schema.toml --silo a.csv --silo b.csv --epsilon 3
    --trust masks`
    """
    if run is not None:
        given = {"--schema": schema, "--silo": silo, "--columns": columns, "--strata": strata}
        given |= {"--epsilon": epsilon, "--delta": delta, "--plan": plan, "--page": page}
        given |= {"--record": record}
        if extra := [name for name, value in given.items() if value]:
            raise BadInput(
                f"{extra[0]} is for files, but a run is given, which is already paid for; leave "
                "one of them out"
            )
        return _of_run(run, as_json)
    from silodp.simulation.scoring import estimate_data, plan_estimate
    from silodp.simulation.source import Source

    order = one_question(epsilon, delta, trust, colluding, seed)
    source = Source(silos=tuple(silo or ()), schema=schema)
    words = {"columns": _columns(columns), "strata": _strata(strata)}
    if plan:
        return _show(plan_estimate(order, source, **words), as_json)
    recorder = Recorder.into(record, "estimate", columns=columns, strata=strata)
    with interruptible(NOTHING):
        answer = estimate_data(order, source, **words)
    _tell_ratios(answer, as_json, page, recorder)


def logrank(
    by: By,
    schema: Schema = None,
    silo: Silo = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """The log-rank test: do two groups have the same survival? By one question, and with the
    privacy noise in the p-value.

    Example: `silodp stats logrank --by treated --schema schema.toml --silo a.csv --silo b.csv
    --epsilon 1`
    """
    from silodp.simulation.scoring import logrank_data
    from silodp.simulation.source import Source

    order = one_question(epsilon, delta, trust, colluding, seed)
    recorder = Recorder.into(record, "logrank", by=by)
    with interruptible(NOTHING):
        answer = logrank_data(order, Source(silos=tuple(silo or ()), schema=schema), by)
    tell(answer, as_json, show_logrank, recorder)


def federation_estimate(
    folder: Folder = Path("federation"),
    epsilon: Charge = 1.0,
    columns: Columns = None,
    strata: Strata = None,
    plan: Plan = False,
    page: Page = None,
    deadline: Deadline = 60.0,
    as_json: Json = False,
) -> None:
    """Odds ratios, rate ratios or hazard ratios of what the silos train on, with 95 % intervals;
    their policies must allow it.

    Example: `silodp federation up --project . --allow-profile` and then `silodp federation estimate
    --epsilon 1`
    """
    from silodp.server.estimates.regression import SHARES, answer, model_of, planned

    cards, budgets, trust = cards_of(folder, epsilon)
    chosen = _columns(columns)
    words = {"strata": _strata(strata), "trust": trust}
    model = model_of(schema_of(cards[0]), chosen, **words)
    if plan:
        return _show(
            plan_once(model.name, folder, cards, budgets, partial(planned, model=model)), as_json
        )
    found = once(
        "estimate",
        folder,
        cards,
        budgets,
        deadline,
        partial(answer, model=model),
        shares=SHARES,
        words=[list(chosen), strata],
    )
    recorder = of_federation(folder, "estimate", columns=columns, strata=strata)
    _tell_ratios(found, as_json, page, recorder)


def federation_logrank(
    by: By,
    folder: Folder = Path("federation"),
    epsilon: Charge = 1.0,
    deadline: Deadline = 60.0,
    as_json: Json = False,
) -> None:
    """The log-rank test between two groups of what the silos train on, by one question of each;
    their policies must allow it.

    Example: `silodp federation up --project . --allow-profile` and then `silodp federation logrank
    --by treated --epsilon 1`
    """
    from silodp.server.estimates.logrank import logrank as test
    from silodp.server.estimates.logrank import two_groups

    cards, budgets, _ = cards_of(folder, epsilon)
    label, groups = two_groups(schema_of(cards[0]), by)
    ask = partial(test, label=label, groups=groups)
    answer = once("logrank", folder, cards, budgets, deadline, ask, words=[by])
    tell(answer, as_json, show_logrank, of_federation(folder, "logrank", by=by))


def _columns(columns: str | None) -> Sequence[str]:
    """Return the names in a list with commas."""
    return tuple(name.strip() for name in (columns or "").split(",") if name.strip())


def _strata(strata: str | None) -> bool:
    """Return whether silos are strata. Raise BadInput for other strata."""
    if strata not in (None, "silo"):
        raise BadInput(f"--strata is {strata!r}; it must be silo, or left out")
    return strata is not None


def _tell_ratios(
    answer: dict[str, Any], as_json: bool, page: Path | None, recorder: Recorder
) -> None:
    """Print the ratios with their price, and draw them on a page if one is named."""
    if page:
        from silodp.cli.pages import put
        from silodp.pages.ratios import page_of

        put(page, page_of(answer))
    tell(answer, as_json, show_estimate, recorder)


def _show(planned: dict[str, Any], as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        return dump(planned)
    show_plan(planned)


def _of_run(run: Path, as_json: bool) -> None:
    """Print the coefficients of a linear regression of a run, which costs nothing more.

    A coefficient is the change of the prediction, in its own unit, for one unit of the column (or
    for yes instead of no). The coverage under repeated sampling and noise around the estimate is
    measured. An interval is called 95 % only if that coverage holds and no record was scaled down.
    """
    from silodp.host.model import open_model
    from silodp.server.estimates.intervals import estimated, sentence

    found = estimated(run, open_model(run, {}))
    if as_json:
        return dump(found)
    rows = (
        (
            row["name"],
            *(
                f"{row[name]:.4g}"
                for name in ("estimate", "error", "noise", "low", "high", "p_value")
            ),
            f"{row['coverage']:.1%}",
        )
        for row in found["coefficients"]
    )
    show(
        table(
            "column|estimate>|std. error>|noise part>|low>|high>|p>|coverage>",
            rows,
            title=found["title"],
        )
    )
    say(sentence(found))
