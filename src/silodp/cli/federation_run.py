"""`silodp federation run`: train over silos that are processes of their own, here or elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from silodp.cli import federation_folder as place_of
from silodp.cli import federation_shuffle as shuffle
from silodp.cli.console import dump, progress, say, say_advice
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
                "Answers without which a round does not count; with fewer the run ends. 1; of "
                "totals, all."
            )
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            help=(
                "Seconds after which a round goes on without whoever is silent. 60, and more "
                "for models and silos that take longer."
            )
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(help="Seconds that a round waits for the quorum. 300, and more likewise."),
    ] = None,
    retry: Annotated[
        float | None,
        typer.Option(
            help=(
                "Seconds after which the same question is sent again; each further time after "
                "twice as long. 10, and more likewise."
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
            help="No server: a process for each silo, which pass their replies on; see docs.",
        ),
    ] = False,
    own_name: Annotated[
        str | None,
        typer.Option(
            "--as", help="The silo whose process this is, with --peers, --card and --key."
        ),
    ] = None,
    gate: Annotated[Path | None, typer.Option(help="The socket of that silo's gate.")] = None,
    relay: Annotated[
        Path | None, typer.Option(help="The folder through which peers pass replies on.")
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            help="A word for the run, with --as: the same at all peers, and new for each run."
        ),
    ] = None,
    hub: Annotated[
        Path | None,
        typer.Option(help="The engine's socket, where the silos are on machines of their own."),
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
    """Train over the silos. Killed at any time, it goes on with --resume, and no silo pays a second
    time.

    Example: `silodp federation run --algorithm spider --epsilon 3 --rounds 25`
    """
    from silodp.server.folder import read_run
    from silodp.server.quote import RunHolds
    from silodp.server.remote import Timeouts
    from silodp.server.run import NetworkRun

    if (own_name or gate or relay or run_id) and not peers:
        raise BadInput(
            "--as, --gate, --relay and --run-id belong to --peers; leave them out, or give it"
        )
    if peers and shuffler:
        raise BadInput(NO_TOTALS)
    if own_name and not (gate and relay and run_id):
        raise BadInput(PEER_NEEDS)
    away = own_name or hub
    if bool(away) != bool(card) or bool(away) != bool(key_file) or (hub and peers):
        raise BadInput(
            "--hub or --as, --card and --key belong together: give all three, or a "
            "--folder that `silodp federation up` made"
        )
    if peers and not own_name:
        if quorum is not None:
            raise BadInput(
                f"--quorum is {quorum}; among peers every silo that is asked must answer: "
                "leave it out"
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
        if state.get("shuffler"):
            shuffler = Path(state["shuffler"]).parent / "shuffler.json"
        else:
            shuffler = None
    if shuffler:
        mixer = shuffle.shuffler_card(shuffler)
    else:
        mixer = None
    place = place_of.place_of_run(
        out_dir, (folder if not away else Path()) / "runs", resume=resume, new=new
    )
    if resume:
        order = Order.read(read_run(place), place)
    else:
        masked = not mixer and all(card.trust == "masks" for card in cards)
        if masked:
            trust = "masks"
        elif mixer:
            trust = "shuffle"
        else:
            trust = "isrl"
        if masked:
            colluding = max(card.colluding for card in cards)
        else:
            colluding = 0
        order = replace(
            order,
            trust=trust,
            least=quorum if mixer or masked else None,
            colluding=colluding,
            drops=drops,
        )
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
    waits = None
    if (deadline, patience, retry) != (None, None, None):  # then nothing is estimated
        if deadline is None:
            until = Timeouts.deadline
        else:
            until = deadline
        often = Timeouts.retry if retry is None else retry
        waits = Timeouts(
            deadline=until,
            limit=max(Timeouts.limit if patience is None else patience, until),
            retry=min(often, until),
        )
    conduct = NetworkRun(
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
        holds=peer.holds if peer else RunHolds,
        held=_show_held if not as_json else lambda held: None,
        advice=advice.words() if advice else None,
    )
    with interruptible(place_of.kept_in(place, resume=resume, given=bool(out_dir))):
        _follow(conduct, len(cards), quiet=as_json)
    same = ""
    if peer and not as_json:
        from silodp.server.peers import model_hash

        same = (
            f"The model's SHA-256 is {model_hash(RunFolder(place).model)}; compare it "
            "with the other peers'."
        )
    _show(conduct.summary, as_json, same, f"Model, summary and journal are in {place}.")


def _show(summary: Mapping[str, Any], as_json: bool, *more: str) -> None:
    """What each silo answered and spent, and how the run ended: exit code 3 if it has a model but
    did not come to its end.
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
        say(
            f"{silo['name']}: answered {silo['answered']} of {summary['questions']} "
            "questions, spent at most epsilon "
            f"{shown(silo['spent_epsilon_at_most'])} of {silo['epsilon']:g} at delta "
            f"{rounded_up(silo['delta'])}{_alone(silo, summary['trust'])}"
            f"{f', {UNCHANGED}' if summary.get('partitioned') else ''}{f'; {missed}' if missed else ''}."  # noqa: E501
        )
    say(summary["unit"])
    if summary["trust"] != "isrl":
        say(f"Here {summary['said']}.")
    ended = summary["ended"]
    say(
        f"{summary['iterates']} iterates; "
        f"{'finished' if ended == 'finished' else f'ended early: {ended}'}."
    )
    if ended != "finished":
        say(EARLY)


def _show_held(held: Mapping[str, HoldReply]) -> None:
    shares = ", ".join(
        f"{name} {rounded_up(100 * (reply.needed or 0.0), 1, 'f')} %"
        for name, reply in held.items()
    )
    say(
        f"Held for the run, of each silo's budget: {shares}. It is spent question by "
        "question; what is not is released at the end."
    )


def _alone(silo: Mapping[str, Any], trust: str) -> str:
    """What whoever sees the silo's own numbers could learn, under a trust that counts on others'
    noise.
    """
    if "local_epsilon_at_most" not in silo:
        return ""
    local = silo["local_epsilon_at_most"]
    return (
        f" against the server, {shown(local) if local is not None else 'no bound'} {ALONE[trust]}"
    )


def _follow(conduct: Any, silos: int, *, quiet: bool) -> None:
    away: dict[str, str] = {}
    with progress("round", quiet=quiet) as tick:
        for told in conduct:
            if not quiet:
                say(*_changes(away, told))
            left = min(told.left.values())
            words = (
                f"{len(told.answered)}/{silos} silos answered, {max(left, 0.0):.0%} of the "
                "run's budget left"
            )
            words += "".join(f", {name} {code}" for name, code in told.dropped.items()) + (
                " (replayed)" if told.replayed else ""
            )
            tick(told.iterate, conduct.total, words)


def _changes(away: dict[str, str], told: Any) -> list[str]:
    """A sentence for each silo that has ceased to answer, and for each that answers again, since
    `away`, which is brought up to date.
    """
    from silodp.server.remote import RETIRED

    said = []
    for name, code in told.dropped.items():
        if name not in away and code in RETIRED:
            said.append(
                f"{name} has left the run ({code}): it is asked nothing more, and the run "
                "goes on with the others while enough of them answer."
            )
        elif name not in away and code != "retired":
            said.append(
                f"{name} did not answer ({code}): the run goes on without it, and asks it again."
            )
        away.setdefault(name, code)
    back = [name for name in told.answered if away.pop(name, None)]
    return said + [f"{name} answers again." for name in back]
