"""`silodp federation run`: train over silos that are separate processes, on this machine or
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli import federation_folder as place_of
from silodp.cli import federation_shuffle as shuffle
from silodp.cli.console import complain, dump, progress, say, say_advice
from silodp.cli.federation import Folder, attested
from silodp.cli.federation_files import carrier_of, load_state, problem_of, read_key
from silodp.cli.federation_peers import NO_TOTALS, PEER_NEEDS, one_peer, run_peers, same_models
from silodp.cli.interrupted import interruptible
from silodp.cli.options import Drops, Json, New, OutFolder, Resume, SchemaFile, takes_order
from silodp.cli.project import Project, SettingsFile
from silodp.core.errors import BadInput
from silodp.core.figures import ALONE, EARLY, UNCHANGED, rounded_up, shown
from silodp.host.cards import read_card
from silodp.runs import RunFolder
from silodp.server.cautions import cautions
from silodp.server.order import AUTO, Order
from silodp.wire.hub import Hub

if TYPE_CHECKING:
    from silodp.core.protocol.quote import HoldReply


@takes_order("delta", "user_level", "trust", "least", "colluding", "drops", "rule", "noise")
def run(
    order: Order,
    project: Project = None,
    settings_file: SettingsFile = None,
    folder: Folder = Path("federation"),
    quorum: Annotated[
        int | None,
        typer.Option(
            help=(
                "Fewest answers in a valid round; with fewer the run ends. Default 1; "
                "with totals, all silos."
            )
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            help=(
                "Seconds after which a round continues without absent silos. Default "
                "60, or more for slow models and silos."
            )
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a round waits for the quorum. Default 300, or more as for "
            "--deadline."
        ),
    ] = None,
    retry: Annotated[
        float | None,
        typer.Option(
            help=(
                "Seconds after which a question is sent again; each repetition doubles "
                "the time. Default 10, or more as for --deadline."
            )
        ),
    ] = None,
    drops: Drops = 0.0,
    resume: Resume = False,
    new: New = False,
    out_dir: OutFolder = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Train without a server: one process for each silo; they exchange replies. "
            "See docs.",
        ),
    ] = False,
    own_name: Annotated[
        str | None,
        typer.Option("--as", help="Name of this process's silo, with --peers, --card and --key."),
    ] = None,
    gate: Annotated[Path | None, typer.Option(help="The socket of that silo's gate.")] = None,
    relay: Annotated[
        Path | None, typer.Option(help="The folder through which peers exchange replies.")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(help="Id of the run, with --as: equal at all peers, and new for each run."),
    ] = None,
    hub: Annotated[
        Path | None,
        typer.Option(help="The engine's socket, if the silos are on other machines."),
    ] = None,
    card: Annotated[
        list[Path] | None,
        typer.Option(help="A silo's silo.json, with --hub or --as; once for each silo."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option("--key", help="The server's key, with --hub; with --as the peers'."),
    ] = None,
    shuffler: Annotated[
        Path | None, typer.Option(help="The shuffler's shuffler.json, with --hub, if there is one.")
    ] = None,
    schema: SchemaFile = None,
    as_json: Json = False,
) -> None:
    """Train over the silos, here or on other machines. A run that is killed continues with
    --resume, and no silo pays twice.

    Example: `silodp federation run --algorithm spider --epsilon 3 --rounds 25`
    """
    from silodp.server.folder import read_run
    from silodp.server.quote import RunHolds
    from silodp.server.remote import Timeouts
    from silodp.server.run import NetworkRun

    if (own_name or gate or relay or run_id) and not peers:
        raise BadInput(
            "--as, --gate, --relay and --run-id need --peers; leave them out, or add --peers"
        )
    if peers and shuffler:
        raise BadInput(NO_TOTALS)
    if own_name and not (gate and relay and run_id):
        raise BadInput(PEER_NEEDS)
    away = own_name or hub
    if bool(away) != bool(card) or bool(away) != bool(key_file) or (hub and peers):
        raise BadInput(
            "--hub or --as, --card and --key must be given together; give all three, "
            "or a --folder that `silodp federation up` made"
        )
    if peers and not own_name:
        if quorum is not None:
            raise BadInput(
                f"--quorum is {quorum}; among peers every queried silo must answer; leave it out"
            )
        summary = run_peers(folder.resolve(), resume=resume, new=new, out_dir=out_dir, relay=relay)
        return _show(
            summary,
            as_json,
            same_models(summary),
            f"The peers' folders are beside {summary['model']}.",
        )
    peer = None
    if own_name and card and key_file:
        cards = [read_card(path) for path in card]
        signing = read_key(key_file)
        carrier = peer = one_peer(own_name, gate, relay, run_id, cards, quorum)
        quorum = len(cards)
    elif hub and card and key_file:
        carrier = Hub(hub)
        cards = [read_card(path) for path in card]
        signing = read_key(key_file)
    else:
        folder = folder.resolve()
        state = load_state(folder)
        carrier = carrier_of(folder, state)
        signing = read_key(folder / "asker.key")
        cards = [read_card(Path(policy).parent / "silo.json") for policy in state["silos"].values()]
        shuffler = None
        if state.get("shuffler"):
            shuffler = Path(state["shuffler"]).parent / "shuffler.json"
    mixer = None
    if shuffler:
        mixer = shuffle.shuffler_card(shuffler)
    runs = folder / "runs"
    if away:
        runs = Path("runs")
    place = place_of.place_of_run(out_dir, runs, resume=resume, new=new)
    if resume:
        order = Order.read(read_run(place), place)
    else:
        trust = "isrl"
        least = None
        colluding = max(card.colluding for card in cards)
        if mixer:
            trust = "shuffle"
            least = quorum
        elif all(card.trust == "masks" for card in cards):
            trust = "masks"
            least = quorum
        else:
            colluding = 0
        order = replace(order, trust=trust, least=least, colluding=colluding, drops=drops)
        place_of.refuse_taken(place)
    advice = None
    if order.algorithm == AUTO:
        from silodp.server.run import advised

        advice = advised(order, cards)
        order = advice.order
        if not as_json:
            say_advice(advice)
    if not as_json:
        say(attested({card.name: card.checked for card in cards}))
    names = [card.name for card in cards]
    for sentence in cautions(order, names, [card.records for card in cards]):
        complain(sentence)
    waits = None
    if (deadline, patience, retry) != (None, None, None):  # Then no time is estimated.
        given = {"deadline": deadline, "limit": patience, "retry": retry}
        seconds = {
            "deadline": Timeouts.deadline,
            "limit": Timeouts.limit,
            "retry": Timeouts.retry,
        }
        seconds |= {name: value for name, value in given.items() if value is not None}
        waits = Timeouts(
            deadline=seconds["deadline"],
            limit=max(seconds["limit"], seconds["deadline"]),
            retry=min(seconds["retry"], seconds["deadline"]),
        )
    holds = RunHolds
    if peer:
        holds = peer.holds
    reserved = _show_reserved
    if as_json:
        reserved = _ignore
    words = None
    if advice:
        words = advice.words()
    network_run = NetworkRun(
        cards,
        problem_of(cards[0], order, schema),
        order,
        carrier,
        place,
        key=signing,
        quorum=quorum or 1,
        timeouts=waits,
        shuffler=mixer,
        run=run_id,
        holds=holds,
        held=reserved,
        advice=words,
    )
    with interruptible(place_of.kept_in(place, resume=resume, given=bool(out_dir))):
        _follow(network_run, len(cards), quiet=as_json)
    same = ""
    if peer and not as_json:
        from silodp.server.peers import model_hash

        same = (
            f"The model's SHA-256 is {model_hash(RunFolder(place).model)}. Compare it "
            "with the other peers'."
        )
    _show(network_run.summary, as_json, same, f"Model, summary and journal are in {place}.")


def _show(summary: Mapping[str, Any], as_json: bool, *more: str) -> None:
    """Print what each silo answered and spent, and how the run ended. Exit with code 3 if the run
    ended early.
    """
    if as_json:
        dump(summary)
    else:
        _show_spent(summary)
        say(*filter(None, more))
    if summary["ended"] != "finished":
        raise typer.Exit(3)


def _show_spent(summary: Mapping[str, Any]) -> None:
    for silo in summary["silos"]:
        missed = ", ".join(f"{code} {times}" for code, times in silo["dropped"].items())
        words = (
            f"{silo['name']}: answered {silo['answered']} of {summary['questions']} "
            "questions, spent at most epsilon "
            f"{shown(silo['spent_epsilon_at_most'])} of {silo['epsilon']:g} at delta "
            f"{rounded_up(silo['delta'])}{_alone(silo, summary['trust'])}"
        )
        if summary.get("partitioned"):
            words += f", {UNCHANGED}"
        if missed:
            words += f"; {missed}"
        say(f"{words}.")
    say(summary["unit"])
    if summary["trust"] != "isrl":
        say(f"Here {summary['said']}.")
    ended = summary["ended"]
    if ended == "finished":
        say(f"{summary['iterates']} iterates; finished.")
    else:
        say(f"{summary['iterates']} iterates; ended early: {ended}.", EARLY)


def _show_reserved(replies: Mapping[str, HoldReply]) -> None:
    shares = ", ".join(
        f"{name} {rounded_up(100 * (reply.needed or 0.0), 1, 'f')} %"
        for name, reply in replies.items()
    )
    say(
        f"Reserved for the run, of each silo's budget: {shares}. Each question spends a part of "
        "it. The rest is released at the end."
    )


def _ignore(replies: Mapping[str, HoldReply]) -> None:
    pass


def _alone(silo: Mapping[str, Any], trust: str) -> str:
    """Return the epsilon against an observer of the silo's own numbers, under a trust that relies
    on others' noise.
    """
    if "local_epsilon_at_most" not in silo:
        return ""
    local = silo["local_epsilon_at_most"]
    bound = "no bound"
    if local is not None:
        bound = shown(local)
    return f" against the server, {bound} {ALONE[trust]}"


def _follow(network_run: Any, silos: int, *, quiet: bool) -> None:
    away: dict[str, str] = {}
    with progress("round", quiet=quiet) as tick:
        for step in network_run:
            if not quiet:
                say(*_changes(away, step))
            left = min(step.left.values())
            words = (
                f"{len(step.answered)}/{silos} silos answered, {max(left, 0.0):.0%} of the "
                "run's budget left"
            )
            words += "".join(f", {name} {code}" for name, code in step.dropped.items())
            if step.replayed:
                words += " (replayed)"
            tick(step.iterate, network_run.total, words)


def _changes(away: dict[str, str], step: Any) -> list[str]:
    """Return a sentence for each silo that has stopped answering, and for each that answers again.
    Update `away`.
    """
    from silodp.server.remote import RETIRED

    words = []
    for name, code in step.dropped.items():
        if name not in away and code in RETIRED:
            words.append(
                f"{name} has left the run ({code}) and gets no more questions. The run "
                "continues with the others while enough of them answer."
            )
        elif name not in away and code != "retired":
            words.append(
                f"{name} did not answer ({code}). The run continues without it, and "
                "sends it later questions."
            )
        away.setdefault(name, code)
    back = [name for name in step.answered if away.pop(name, None)]
    return words + [f"{name} answers again." for name in back]
