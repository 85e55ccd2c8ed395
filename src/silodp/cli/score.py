"""`silodp evaluate`, `profile` and `survival`, and the same over a federation: figures of held-out
records, of features and of survival times, each with its price.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli.console import Classes, LabelColumn, dump, say
from silodp.cli.federation import Folder
from silodp.cli.federation_files import carrier_of, load_state, problem_of, read_key
from silodp.cli.federation_folder import last_run
from silodp.cli.federation_shuffle import shuffler_card
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Json
from silodp.cli.project import Project
from silodp.cli.recorded import Recorder, RecordIn, of_federation
from silodp.cli.score_tables import (
    show_charged,
    show_evaluation,
    show_expectation,
    show_forecast,
    show_profile,
    show_survival,
)
from silodp.core.errors import BadInput
from silodp.core.figures import rounded_up, shown
from silodp.host.cards import read_card, schema_of
from silodp.runs import RunFolder
from silodp.server.approval import check_study
from silodp.server.order import Order, least_of_all

if TYPE_CHECKING:
    from silodp.core.mechanisms import Gaussian
    from silodp.core.privacy.accounting import Budget
    from silodp.core.protocol.card import Card
    from silodp.server.federation import Federation
    from silodp.server.remote import Remote


Bins = Annotated[
    int | None,
    typer.Option(
        help="Bins of the predicted risk, for two classes. By default the number follows from the "
        "price."
    ),
]
Cap = Annotated[
    float | None,
    typer.Option(
        help="Where a record's loss or error is clipped, in the label's own unit. Default 4 for a "
        "loss; for an error the largest that the schema allows."
    ),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="The risk from which the second of two classes is predicted, for sensitivity and "
        "specificity. Default w0 / (w0 + w1) of the schema's weights, or 0.5."
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        help=(
            "Also measure the accuracy of each group of a category or boolean column of the "
            "schema, within the same price."
        ),
    ),
]
Price = Annotated[
    str | None,
    typer.Option(
        "--epsilon",
        help="Epsilon that each silo spends on this, in addition to all earlier spending. Without "
        "it the command prints how precise the answer would be, and spends nothing.",
    ),
]
Pays = Annotated[
    list[str] | None,
    typer.Option(
        "--epsilon", help="Epsilon that each silo spends: a number, or NAME=NUMBER for one silo."
    ),
]
Delta = Annotated[
    list[str] | None, typer.Option("--delta", help="As epsilon; 1/n^2 of each silo by default.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Fixes the noise: for research only.")]
Charge = Annotated[
    float,
    typer.Option(
        "--epsilon",
        help="Epsilon that each silo spends on this. Its ledger adds it to all earlier spending.",
    ),
]
MaybeCharge = Annotated[
    float | None,
    typer.Option(
        "--epsilon",
        help="Epsilon that each silo spends on this. Its ledger adds it to all earlier spending. "
        "Without it the command prints how precise the answer would be, and spends nothing.",
    ),
]
Trust = Annotated[
    str,
    typer.Option(
        help="Who is trusted: isrl (no other party), masks or shuffle (silos answer in totals)."
    ),
]
Colluding = Annotated[
    int,
    typer.Option(help="Silos that may give the server their noise, with --trust masks or shuffle."),
]
Deadline = Annotated[
    float, typer.Option("--deadline", help="Seconds after which a silent silo is left out.")
]
NOTHING = "nothing was shown, so nothing was spent"
"""What an interrupted question in simulation leaves behind."""
REPEATED = (
    "the same command asks the same questions, and a gate that has answered one gives its "
    "stored answer, at no further price"
)
TOTALS = (
    "The server sees one total over all silos, so there are no figures by silo. The price is "
    "against the server."
)


def evaluate(
    run: Annotated[Path, typer.Argument(help="The run folder of `silodp train --held-out ...`.")],
    epsilon: Price = None,
    bins: Bins = None,
    cap: Cap = None,
    threshold: Threshold = None,
    by: By = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Measure how good a run's model is on held-out records, by one priced release of each silo.

    Without --epsilon it prints how precise the answer would be at several prices, and proposes one.
    That costs nothing. With --epsilon it prints price and expected precision before it asks. What
    training and evaluations cost together is in the run's summary.json.

    Example: `silodp train --data wbcd --held-out 0.2 --out runs/a`, then `silodp evaluate runs/a`,
    then `silodp evaluate runs/a --epsilon 1`
    """
    from silodp.server.evaluation import Wanted
    from silodp.simulation.scoring import evaluate_run

    with interruptible(
        f"the price of each question that was asked is in {RunFolder(run).result}, and each "
        "answer is in evaluations.jsonl beside it"
    ):
        answer = evaluate_run(
            run,
            epsilon=epsilon,
            wanted=Wanted(bins, cap, threshold),
            seed=seed,
            by=by,
            on_expectation=None if as_json else show_expectation,
        )
    if as_json:
        return dump(answer)
    if "forecast" in answer:
        return show_forecast(answer)
    _show_evaluation(answer)
    for silo, trained, own, both in zip(
        *(answer[part] for part in ("silos", "training", "evaluations", "in_all")), strict=True
    ):
        if own and own["count"] > 1:
            evaluations = f"epsilon {shown(own['epsilon'])} for {own['count']} in all; "
        else:
            evaluations = ""
        say(
            f"{silo['name']}: epsilon {shown(silo['spent_epsilon'])} for this evaluation; "
            f"{evaluations}training spent "
            f"{shown(trained['epsilon'])}; together {shown(both['epsilon'])} at delta "
            f"{rounded_up(both['delta'])}."
        )


def _show_evaluation(answer: dict[str, Any]) -> None:
    show_evaluation(answer)
    if answer["trust"] in ("masks", "shuffle"):
        say(TOTALS)


def profile(
    data: Annotated[str | None, typer.Option(help="A built-in data set, instead of files.")] = None,
    silo: Annotated[
        list[Path] | None,
        typer.Option(help="One CSV, Parquet or NPZ file for each silo; cells may be missing."),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The public schema of the files, in TOML. It defines the features, and the "
                "person column if there is one."
            )
        ),
    ] = None,
    label: LabelColumn = "label",
    classes: Classes = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """Print private means, deviations, ranges, missing rates and class counts over all silos, with
    error bars and the price.

    Example: `silodp stats profile --silo a.csv --silo b.csv --label outcome --epsilon 1`
    """
    from silodp.simulation.scoring import profile_data
    from silodp.simulation.source import Source

    order = one_question(epsilon, delta, trust, colluding, seed)
    recorder = Recorder.into(record, "profile")
    source = Source(data, tuple(silo or ()), label, classes, schema, scale="none")
    with interruptible(NOTHING):
        answer = profile_data(order, source)
    tell(answer, as_json, show_profile, recorder)


Page = Annotated[
    Path | None,
    typer.Option("--page", help="Also draw the curve on a page of its own, such as curve.html."),
]


def survival(
    schema: Annotated[
        Path | None,
        typer.Option(
            help="The public schema of the files, in TOML, whose label is a survival time."
        ),
    ] = None,
    silo: Annotated[
        list[Path] | None, typer.Option(help="One CSV, Parquet or NPZ file for each silo.")
    ] = None,
    epsilon: Pays = None,
    delta: Delta = None,
    trust: Trust = "isrl",
    colluding: Colluding = 0,
    page: Page = None,
    seed: Seed = None,
    record: RecordIn = None,
    as_json: Json = False,
) -> None:
    """Draw a private Kaplan-Meier curve over all silos, by one question: how many had the event, or
    were lost, in each of the public time bins.

    The 95 % band includes the privacy noise. The curve ends where the noise hides the number of
    remaining persons.

    Example: `silodp stats survival --schema schema.toml --silo a.csv --silo b.csv --epsilon 1
    --page curve.html`
    """
    from silodp.simulation.scoring import survival_data
    from silodp.simulation.source import Source

    order = one_question(epsilon, delta, trust, colluding, seed)
    recorder = Recorder.into(record, "survival")
    with interruptible(NOTHING):
        answer = survival_data(order, Source(silos=tuple(silo or ()), schema=schema))
    tell(answer, as_json, show_survival, recorder, page)


def one_question(
    epsilon: list[str] | None, delta: list[str] | None, trust: str, colluding: int, seed: int | None
) -> Order:
    """Return the order of what is asked without a training."""
    return Order(
        epsilon=tuple(epsilon or ("1",)),
        delta=tuple(delta or ()),
        trust=trust,
        colluding=colluding,
        seed=seed,
    )


def tell(
    answer: dict[str, Any],
    as_json: bool,
    show: Callable[[dict], None],
    recorder: Recorder | None = None,
    page: Path | None = None,
) -> None:
    """Record the answer, and print it as JSON or for people, with its price. Draw a survival curve
    on a `page` too.
    """
    if page:
        from silodp.cli.pages import put
        from silodp.pages.survival import page_of

        put(page, page_of(answer))
    if as_json:
        dump(answer)
    else:
        show(answer)
        show_charged(answer["silos"])
    if recorder:
        recorder.write(answer, quiet=as_json)


# --- over a federation ---------------------------------------------------------------------------


def federation_evaluate(
    folder: Folder = Path("federation"),
    epsilon: MaybeCharge = None,
    run: Annotated[
        Path | None, typer.Option(help="The run's folder; the last one by default.")
    ] = None,
    bins: Bins = None,
    cap: Cap = None,
    threshold: Threshold = None,
    by: By = None,
    deadline: Deadline = 60.0,
    model: Annotated[
        str | None, typer.Option(help="The server's own copy of a model FILE.py:FUNCTION.")
    ] = None,
    prox: Annotated[
        str, typer.Option(help="The server's own copy of a prox FILE.py:NAME.")
    ] = "zero",
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Measure how good a run's model is on the silos' held-out records. The gates must have been
    made with --held-out.

    Without --epsilon it prints how precise the answer would be at several prices, and proposes one.
    Repeating an evaluation costs nothing: the gates send their stored answers.

    Example: `silodp federation up --data wbcd --held-out 0.2`, then `silodp federation run`, then
    `silodp federation evaluate --epsilon 1`
    """
    import torch

    from silodp.host.model import contents, refuse_personal
    from silodp.runs import json_in
    from silodp.server.estimates.groups import groups_of
    from silodp.server.evaluation import (
        BY,
        SCORE,
        Evaluation,
        Judged,
        Wanted,
        expectation,
        forecast,
    )
    from silodp.server.folder import read_run

    place = run or last_run(folder.resolve() / "runs")
    cards = _read_cards(folder)
    if without := [card.name for card in cards if not card.held_out]:
        raise BadInput(
            f"the silos {', '.join(without)} have no held-out records; make them again with "
            "--held-out 0.2"
        )
    check_study(place, cards)
    problem = problem_of(cards[0], Order(model=model, prox=prox))
    try:
        said, stored = contents(place)
        w = torch.cat([stored[name].flatten() for name in problem.shapes])[None]
    except (BadInput, KeyError):
        raise BadInput(
            f"{place} has no model of this federation; `silodp federation run` makes one"
        ) from None
    refuse_personal(place, said)
    schema = schema_of(cards[0])
    label = schema.label if schema else None
    summary = json_in(RunFolder(place).result)
    described = read_run(place)
    judged = Judged(len(cards[0].classes), label, problem.loss, summary, described["silos"])
    trust = _trust(folder, cards)
    if by is not None:
        groups = groups_of(schema, by, feature_map=cards[0].feature_map)
    else:
        groups = None
    least = Order.read(described, place).least

    def at(price: float) -> Evaluation:
        budgets = _budgets(cards, price)
        if trust != "isrl":
            budgets = [least_of_all(budgets)] * len(cards)
        return Evaluation.of(
            judged,
            Wanted(bins, cap, threshold),
            names=[card.name for card in cards],
            held_out=[card.held_out for card in cards],
            budgets=budgets,
            groups=groups,
            **_counting(cards, trust, least),
        )

    if epsilon is None:
        answer = forecast(at)
        if as_json:
            return dump(answer)
        return show_forecast(answer)
    _refuse_epsilon(cards, epsilon)
    evaluation = at(epsilon)
    asked = evaluation.asked
    words = [
        "evaluate",
        place.name,
        hashlib.sha256(w.numpy().tobytes()).hexdigest(),
        epsilon,
        evaluation.edges,
        asked.cap,
    ]
    if trust != "isrl":
        # A total is of these silos: of others it is another question.
        words.append([[card.name, card.records] for card in cards])
    channels = []

    def port(question: str) -> Federation:
        # Each question is a run of its own: a silo that refuses one is still asked the other. The
        # score beside groups is the same query for every column, and is paid for once.
        more = []
        if by is not None:
            more = {SCORE: ["beside groups"], BY: ["by", by]}[question]
        channel = _channel(folder, cards, [*words, *more], deadline, trust)
        channels.append(channel)
        return _port(channel, cards, evaluation.held_out, trust)

    if not as_json:
        show_expectation(expectation(evaluation))
    with interruptible(REPEATED):
        found = evaluation.run(w, port)
    shares = [1 / evaluation.questions] * evaluation.questions
    charged = _charged(cards, evaluation.budgets, channels, shares)
    answer = {
        "scores": [],
        "cap": asked.cap,
        "cut": asked.cut,
        "bins": asked.cells,
        "run": place.name,
        "trust": trust,
    }
    answer |= found | {"silos": charged}
    line = json.dumps(answer) + "\n"
    kept = RunFolder(
        place
    ).evaluations  # for report, card and pages; asked again it is the same answer, and is kept once
    if not kept.exists() or line not in kept.read_text("utf-8"):
        with open(kept, "a", encoding="utf-8") as file:
            file.write(line)
    tell(answer, as_json, _show_evaluation)
    if "refused" in answer:
        raise BadInput(
            f"there is no score of all records: {answer['refused']}; the figures of "
            f"groups were paid for, and are in {kept}"
        )


def federation_profile(
    folder: Folder = Path("federation"),
    epsilon: Charge = 1.0,
    deadline: Deadline = 60.0,
    as_json: Json = False,
) -> None:
    """Print private means, deviations, ranges, missing rates and class counts of the silos'
    training records. Their policies must allow it.

    Example: `silodp federation up --data wbcd --allow-profile` and then `silodp federation profile
    --epsilon 1`
    """
    from silodp.server.estimates.profile import profile as profile_of
    from silodp.server.estimates.profile import releases

    cards, budgets = _cards(folder, epsilon)
    about = {
        "features": cards[0].features,
        "classes": cards[0].classes,
        "schema": schema_of(cards[0]),
    }
    answer = once(
        "profile",
        folder,
        cards,
        budgets,
        deadline,
        partial(profile_of, **about),
        releases(**about),
    )
    tell(answer, as_json, show_profile, of_federation(folder, "profile"))


def federation_survival(
    folder: Folder = Path("federation"),
    epsilon: Charge = 1.0,
    deadline: Deadline = 60.0,
    page: Page = None,
    as_json: Json = False,
) -> None:
    """Draw a private Kaplan-Meier curve of the silos' training records, by one question to each.
    Their policies must allow it.

    Example: `silodp federation up --project . --allow-profile` and then `silodp federation survival
    --epsilon 1`
    """
    from silodp.server.estimates.survival import survival as survival_of
    from silodp.server.estimates.survival import survival_label

    cards, budgets = _cards(folder, epsilon)
    schema = schema_of(cards[0])
    label = survival_label(schema.label if schema else None)
    tell(
        once("survival", folder, cards, budgets, deadline, partial(survival_of, label=label)),
        as_json,
        show_survival,
        of_federation(folder, "survival"),
        page,
    )


def once(
    kind: str,
    folder: Path,
    cards: Sequence[Card],
    budgets: Sequence[Budget],
    deadline: float,
    ask: Callable[..., dict],
    questions: int = 1,
    *,
    shares: Sequence[float] = (),
    words: Sequence[Any] = (),
) -> dict[str, Any]:
    """Ask `questions` of this kind about the silos' training records. Return the answer, and what
    each silo may have been charged.

    `shares` are the parts of the budget (mu^2) that the questions take, if they differ. `words` are
    what the questions depend on, beside kind and price.
    """
    from silodp.core.problem.person import unit
    from silodp.server.releases import ReleaseList

    trust = _trust(folder, cards)
    asked = [kind, budgets[0].epsilon, *words]
    if trust != "isrl":
        asked.append([[card.name, card.records] for card in cards])
        budgets = [least_of_all(budgets)] * len(cards)
    channel = _channel(folder, cards, asked, deadline, trust)
    trained = [card.records - card.held_out for card in cards]
    port = _port(channel, cards, trained, trust)
    port.record = released = ReleaseList([card.name for card in cards])
    shares = shares or [1 / questions] * questions
    mechanism = _mechanism(kind, folder, cards, budgets, questions)
    try:
        with interruptible(REPEATED):
            found = ask(port, mechanism, counts=trained)
    except BadInput as useless:
        paid = max(silo["epsilon"] for silo in _charged(cards, budgets, [channel], shares))
        if not paid:
            raise
        words = f"{useless}; each silo has paid at most epsilon {shown(paid)}"
        raise BadInput(words) from None
    charged = _charged(cards, budgets, [channel], shares)
    schema = schema_of(cards[0])
    return found | {
        "trust": trust,
        "silos": charged,
        "unit": unit(schema.person if schema else None),
        "releases": released.found,
    }


def plan_once(
    kind: str,
    folder: Path,
    cards: Sequence[Card],
    budgets: Sequence[Budget],
    plan: Callable[..., dict],
) -> dict[str, Any]:
    """Return what `plan` makes of the mechanism of a question, which is not asked."""
    if _trust(folder, cards) != "isrl":
        budgets = [least_of_all(budgets)] * len(cards)
    trained = [card.records - card.held_out for card in cards]
    found = plan(_mechanism(kind, folder, cards, budgets, 1), counts=trained)
    silos = [
        {"name": card.name, "epsilon": budget.epsilon, "delta": budget.delta}
        for card, budget in zip(cards, budgets, strict=True)
    ]
    return found | {"silos": silos}


def _mechanism(
    kind: str, folder: Path, cards: Sequence[Card], budgets: Sequence[Budget], questions: int
) -> Gaussian:
    """Return the mechanism of which `questions` releases take the budgets."""
    from silodp.server.estimates.scoring import gaussian_for

    return gaussian_for(kind, budgets, questions, **_counting(cards, _trust(folder, cards), None))


def cards_of(folder: Path, epsilon: float) -> tuple[list[Card], list[Budget], str]:
    """Return the silos' cards, what each pays, and the trust under which they answer. Raise
    BadInput for a price that they do not have.
    """
    cards, budgets = _cards(folder, epsilon)
    return cards, budgets, _trust(folder, cards)


def _cards(folder: Path, epsilon: float) -> tuple[list[Card], list[Budget]]:
    """Return the silos' cards, and what each pays. BadInput if it is not within their budgets."""
    cards = _read_cards(folder)
    _refuse_epsilon(cards, epsilon)
    return cards, _budgets(cards, epsilon)


def _read_cards(folder: Path) -> list[Card]:
    return [
        read_card(Path(policy).parent / "silo.json")
        for policy in load_state(folder)["silos"].values()
    ]


def _refuse_epsilon(cards: Sequence[Card], epsilon: float) -> None:
    """Raise BadInput for a price that is not within the silos' budgets."""
    if not 0 < epsilon < min(card.epsilon for card in cards):
        raise BadInput(
            f"epsilon is {epsilon:g}; give a value above 0 and below every silo's total budget"
        )


def _budgets(cards: Sequence[Card], epsilon: float) -> list[Budget]:
    from silodp.core.privacy.accounting import Budget

    return [Budget(epsilon, card.delta) for card in cards]


def _port(channel: Remote, cards: Sequence[Card], counts: Sequence[int], trust: str) -> Federation:
    """Return what is asked through: each silo, or under masks or a shuffle the total of all. Of
    each silo so many records are asked about.
    """
    from silodp.core.weights import Weights
    from silodp.server.federation import Everyone, Federation
    from silodp.server.shuffled import ShuffledFederation

    everyone = Everyone(channel.silos)
    if trust == "isrl":
        return Federation(channel, everyone)
    records = [card.records for card in cards]
    others = [n - asked for n, asked in zip(records, counts, strict=True)]
    return ShuffledFederation(channel, everyone, Weights("records", tuple(records), tuple(others)))


def _counting(cards: Sequence[Card], trust: str, least: int | None) -> dict[str, Any]:
    """Return the trust, and on how many silos' shares of noise a total counts."""
    colluding = max(card.colluding for card in cards)
    return {"trust": trust, "counted": (least or len(cards)) - colluding}


def _trust(folder: Path, cards: Sequence[Card]) -> str:
    """Return the kind of trust under which the federation's silos answer."""
    if load_state(folder).get("shuffler"):
        return "shuffle"
    if all(card.trust == "masks" for card in cards):
        return "masks"
    return "isrl"


def _channel(
    folder: Path, cards: Sequence[Card], asked: Sequence[Any], deadline: float, trust: str
) -> Remote:
    """Return the channel to the silos, or under masks or a shuffle to their sum.

    The ids of questions follow from `asked`, in JSON. So the same question again is a repetition
    and is not paid for again.
    """
    from silodp.server.journal import Journal
    from silodp.server.remote import Timeouts
    from silodp.server.remote_masked import MaskedRemote
    from silodp.server.remote_repeated import RepeatedRemote
    from silodp.server.remote_shuffled import ShuffledRemote

    folder = folder.resolve()
    run = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
    waits = Timeouts(deadline=deadline, limit=deadline, retry=min(10.0, deadline))
    state = load_state(folder)
    again = f"run `silodp federation {asked[0]}` again"
    about: dict[str, Any] = {
        "run": run,
        "key": read_key(folder / "asker.key"),
        "timeouts": waits,
        "again": again,
    }
    if trust == "isrl":
        return RepeatedRemote(cards, carrier_of(folder, state), **about)
    if trust == "masks":
        place = (
            folder / "evaluations" / run
            # a gate's key is for one answer: asked again without its key, a question would be
            # another
        )
        place.mkdir(0o700, parents=True, exist_ok=True)
        return MaskedRemote(
            cards,
            carrier_of(folder, state),
            quorum=len(cards),
            journal=Journal(RunFolder(place).journal, run, "evaluation"),
            **about,
        )
    mixer = shuffler_card(Path(state["shuffler"]).parent / "shuffler.json")
    return ShuffledRemote(cards, carrier_of(folder, state), shuffler=mixer, **about)


def _charged(
    cards: Sequence[Card],
    budgets: Sequence[Budget],
    channels: Sequence[Remote],
    shares: Sequence[float] = (1.0,),
) -> list[dict]:
    """Return the most that each silo may have been charged by itself, and the ledger's rule where
    it is another than that of Gaussians.

    Each question takes its share of the budget (mu^2). A total may have been asked more often than
    once. Which question it was is not counted, so the largest shares are.
    """
    from silodp.core.privacy.accounting import gdp_epsilon, gdp_mu

    found = []
    for card, budget in zip(cards, budgets, strict=True):
        times = sum(channel.charges[card.name] for channel in channels)
        epsilon = budget.epsilon
        if times != len(shares):  # a part so small that delta alone covers it is not nothing
            most = sorted(shares, reverse=True)[:times]
            part = sum(most) + max(0, times - len(shares)) * max(shares)
            epsilon = times and (
                gdp_epsilon(gdp_mu(budget) * math.sqrt(part), budget.delta) or epsilon
            )
        own = {"name": card.name, "epsilon": epsilon, "delta": budget.delta}
        found.append(own | ({} if card.rule == "gdp" else {"rule": card.rule}))
    return found
