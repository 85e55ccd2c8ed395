"""`silodp silo`: for the operator of a silo. `init` makes what a gate daemon needs, `serve` is the
daemon, `status` says how it is.

What is printed here, and what `silo.json` hands to the server's operator, holds no value of a
record; n is public.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silodp.cli.console import Classes, FeatureMapName, Json, LabelColumn, dump, group, say, tell
from silodp.core.errors import BadInput
from silodp.core.figures import left_of, shown
from silodp.host.lock import running
from silodp.host.log import tally
from silodp.host.process import guarded, leave_no_core
from silodp.host.schema import load_schema
from silodp.host.site import for_unit

if TYPE_CHECKING:
    from silodp.silo.service.policy import DaemonSettings, Policy

silo = group("One silo's gate: make it, run it, look at it.")

PolicyFile = Annotated[Path, typer.Argument(help="The silo's policy.toml.", show_default=False)]


@silo.command()
def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for policy, key and ledger; made if it is not there.", show_default=False
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="The silo's CSV, Parquet or NPZ file, or folder of images.")
    ],
    epsilon: Annotated[
        float,
        typer.Option(help="Epsilon for each record, over everything that will ever be asked."),
    ],
    label: LabelColumn = "label",
    classes: Classes = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="The public schema of all silos' files, instead of --label and --classes."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The silo's name; the folder's by default.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:FUNCTION, of "
                "which a hash is kept."
            )
        ),
    ] = "mlp:16",
    prox: Annotated[
        str,
        typer.Option(
            help="Penalty or constraint: zero, l1:0.01, l2-ball:5, ..., or FILE.py:NAME:PARAMETERS."
        ),
    ] = "zero",
    loss: Annotated[
        str,
        typer.Option(
            help="FILE.py:NAME, of which a hash is kept; by default the loss of the task."
        ),
    ] = "",
    feature_map: FeatureMapName = "",
    delta: Annotated[float | None, typer.Option(help="Delta; 1/n^2 by default.")] = None,
    rule: Annotated[
        str,
        typer.Option(
            help=("The ledger's rule, fixed for good: gdp, renyi or renyi:ORDER. Totals need gdp.")
        ),
    ] = "gdp",
    shuffler: Annotated[
        str | None,
        typer.Option(help="The shuffler's public key, 64 hexadecimal digits."),
    ] = None,
    members: Annotated[
        int, typer.Option(help="With a shuffler: silos that take part, this one among them.")
    ] = 0,
    colluding: Annotated[
        int,
        typer.Option(
            help=("With --shuffler or --least: other silos that may collude with the server.")
        ),
    ] = 0,
    least: Annotated[
        int,
        typer.Option(help="For masks: silos in a total, this one among them, at least."),
    ] = 0,
    asker: Annotated[
        list[str] | None,
        typer.Option(
            help="A server's public key, 64 hexadecimal digits, or NAME=KEY; may be repeated."
        ),
    ] = None,
    study: Annotated[
        str, typer.Option(help="A name for what is approved, which people will read.")
    ] = "",
    anchor: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Where the ledger's count and head hash are kept, if not beside it; best on "
                "another disk."
            )
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            help=(
                "Share of the records that training never sees, by position: do not sort rows "
                "by a value. A file that grows moves a few."
            )
        ),
    ] = 0.0,
    checked: Annotated[
        str,
        typer.Option(
            help=(
                "That `silodp silo check` was run, by hand: DATE by NAME. Public, unlike what "
                "it found."
            )
        ),
    ] = "",
    units: Annotated[
        bool,
        typer.Option(
            "--units",
            help="For the systemd units: their socket, its group, and the courier's user.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make one silo's policy, key and ledger, and check its data. Writes over nothing.

    Example: `silodp silo init clinic --data clinic.csv --label outcome --model mlp:16 --epsilon 3`
    """
    from silodp.silo.service.masking import Masking
    from silodp.silo.service.provision import provision

    leave_no_core()
    if schema and (classes is not None or label != "label"):
        raise BadInput(
            "--schema has the label and its classes already; leave out --label and --classes"
        )
    name = name or folder.resolve().name
    if name == "silo":
        raise BadInput(
            "the silo's name would be 'silo', as its folder's; --name gives it the one by "
            "which the server's operator knows it"
        )
    if classes is None:
        declared = None
    elif classes == "number":
        declared = ()
    else:
        declared = tuple(classes.split(","))
    askers = [text.rpartition("=") for text in asker or ()]
    if len({bool(name) for name, _, _ in askers}) > 1:
        raise BadInput(
            "--asker is a key at one place and NAME=KEY at another; give a name to each, or to none"
        )
    if least:
        masking = Masking((), colluding, least)
    else:
        masking = None
    made = provision(
        folder,
        data=data,
        label=label,
        name=name,
        epsilon=epsilon,
        delta=delta,
        classes=declared,
        model=model,
        prox=prox,
        loss=loss,
        feature_map=feature_map,
        rule=rule,
        askers=[key for _, _, key in askers],
        anchor=anchor,
        schema=schema,
        held_out=held_out,
        shuffler=shuffler,
        members=members,
        colluding=colluding,
        checked=checked,
        masking=masking,
        study=study,
        padded=True,
        asker_names=tuple(name for name, _, _ in askers if name),
        **(for_unit("gate") if units else {}),
    )
    if as_json:
        return dump(asdict(made))
    say(
        f"{made.name}: {made.records} records, {len(made.features)} features, a model of "
        f"{made.parameters} parameters."
    )
    say(*(f"- {sentence}" for sentence in made.findings))
    say(
        f"Wrote {made.policy}: read it, and put the server's public key into askers."
        if not asker
        else f"Wrote {made.policy}: read it."
    )
    say(f"Give {folder / 'silo.json'} to the server's operator; silo.key and the ledger stay here.")
    if made.pseudonym:
        say(f"Give the pseudonym {made.pseudonym} to the shuffler's operator, and to nobody else.")
        if not colluding:
            say(
                "colluding is 0: every other member is trusted to add its noise. To bear c "
                "that do not, set it to c."
            )
    if masking:
        if not colluding:
            say(
                "colluding is 0: every other silo of a total is trusted to add its noise. "
                "To bear c that do not, set it to c."
            )
        say(
            f"Then pin the other silos of its totals: silodp silo key {made.policy}, and "
            f"silodp silo trust {made.policy} OTHER/silo.json."
        )
    say(f"Then start the gate: silodp silo serve {made.policy}")


@silo.command()
def check(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The silo's CSV, Parquet or NPZ file, or folder of images.",
            show_default=False,
        ),
    ],
    schema: Annotated[Path, typer.Option(help="The public schema of all silos' files.")],
    as_json: Json = False,
) -> None:
    """What is wrong with the silo's file, before any budget is spent: each finding with its column,
    its row and what to do.

    Local: nothing is sent and nothing is stored. Exit code 2 if something stops, 0 if there are
    only warnings or nothing.

    Example: `silodp silo check clinic.csv --schema schema.toml`
    """
    from silodp.silo.data.check import check as found_in

    leave_no_core()
    found = found_in(file, load_schema(schema))
    stops = [finding.sentence for finding in found if finding.stops]
    warnings = [finding.sentence for finding in found if not finding.stops]
    if as_json:
        dump({"file": str(file), "stops": stops, "warnings": warnings})
    else:
        say(
            *(f"stop: {sentence}" for sentence in stops),
            *(f"warning: {sentence}" for sentence in warnings),
        )
        if not found:
            say(f"{file} is as the schema says.")
        if not stops:
            say(
                "What was found stays here; that you have looked is public: silodp silo "
                'attest policy.toml --by "NAME".'
            )
    if stops:
        raise typer.Exit(2)


@silo.command()
def serve(policy: PolicyFile, as_json: Json = False) -> None:
    """Answer queries on the policy's socket until SIGTERM.

    Example: `silodp silo serve clinic/policy.toml`
    """
    from silodp.silo.service import daemon

    def told(rules: Policy, place: DaemonSettings) -> None:
        line = f"{rules.silo} answers at {place.socket}"
        dump({"silo": rules.silo, "socket": place.socket}) if as_json else say(line, wrap=False)

    with guarded() as stop:
        daemon.serve(policy, stop, told, tell=lambda words: print(words, file=sys.stderr))


@silo.command()
def pause(policy: PolicyFile, as_json: Json = False) -> None:
    """Refuse every query from now on, also after a restart, until `silodp silo resume`.

    Example: `silodp silo pause clinic/policy.toml`
    """
    _set_paused(
        policy, True, "The gate is paused; an answer that is being computed is finished.", as_json
    )


@silo.command()
def resume(policy: PolicyFile, as_json: Json = False) -> None:
    """Answer again after a pause.

    Example: `silodp silo resume clinic/policy.toml`
    """
    _set_paused(policy, False, "The gate answers again.", as_json)


def _set_paused(policy: Path, wanted: bool, said: str, as_json: bool) -> None:
    from silodp.silo.service.pause import set_paused  # which looks after files as Unix alone does
    from silodp.silo.service.policy import Policy

    rules = Policy.load(policy)
    set_paused(policy, wanted)
    tell({"silo": rules.silo, "paused": wanted}, as_json, said)


@silo.command()
def status(policy: PolicyFile, as_json: Json = False) -> None:
    """Whether the gate runs, what is left of the budget, what was answered and refused.

    Example: `silodp silo status clinic/policy.toml`
    """
    from silodp.silo.ledger.durable import DurableLedger
    from silodp.silo.service.pause import paused
    from silodp.silo.service.policy import DaemonSettings, Policy

    rules = Policy.load(policy)
    place = DaemonSettings.load(policy)
    runs = running(place.ledger)
    opened = DurableLedger.open(Path(place.ledger))
    words = tally(place.log)
    count, head = opened.head()
    acts = [entry.act for entry in opened.entries()]
    passed = ("answered", "repeated", "held", "released", "offered", "started", "stopped", "late")
    found = {
        "silo": rules.silo,
        "running": runs,
        "paused": paused(policy),
        "socket": place.socket,
        "records": opened.records,
        "epsilon": rules.epsilon,
        "delta": rules.delta,
        "spent_epsilon": opened.spent(),
        "left_epsilon": opened.left(),
        "used": opened.used(),
        "charged": acts.count("charge"),
        "answered": acts.count("answer"),
        "repeated": words.get("repeated", 0),
        "answer_after": rules.answer_after,
        "late": words.get("late", 0),
        "refused": {code: times for code, times in sorted(words.items()) if code not in passed},
        "count": count,
        "head": head,
        "expires": rules.expires.isoformat(),
    }
    if as_json:
        return dump(found)
    say(
        f"{rules.silo}: the gate "
        f"{f'runs, and answers at {place.socket}' if runs else 'does not run'}."
    )
    if found["paused"]:
        say("It is paused, and refuses every query; `silodp silo resume` ends that.")
    say(
        f"Epsilon {shown(found['spent_epsilon'])} of {rules.epsilon:g} is "
        f"spent{' against the server' if opened.local() is not None else ''}; "
        f"{left_of(found['used'])} of the budget is left."
    )
    refused = [f"{code} {times}" for code, times in found["refused"].items()]
    if refused:
        said = f"{sum(found['refused'].values())} ({', '.join(refused)})"
    else:
        said = "none"
    say(f"Answered {found['answered']}, repeated {found['repeated']}, refused {said}.")
    if rules.answer_after:
        say(
            f"Replies are sent after {rules.answer_after:g} seconds; {found['late']} took "
            "longer, and their times could tell something"
            f"{': set answer_after higher' if found['late'] else ''}."
        )
    else:
        say(
            "Replies are sent when they are ready, so their times could tell something of "
            "the records; answer_after prevents that."
        )
    say(
        f"The ledger has {count} entries; head {head}. The policy's last day is {found['expires']}."
    )
