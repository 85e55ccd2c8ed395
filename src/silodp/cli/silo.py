"""`silodp silo`: for the operator of a silo. `init` makes the files of a gate daemon, `serve` is
the daemon, `status` shows its state.

The printed output, and `silo.json` for the server's operator, contain no value of a record. n is
public.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silodp.cli.console import Classes, FeatureMapName, Json, LabelColumn, dump, group, say, tell
from silodp.core.errors import BadInput
from silodp.core.figures import shown, used_of
from silodp.host.log import tally
from silodp.host.portable import guarded, leave_no_core, running
from silodp.host.schema import load_schema
from silodp.host.tables import for_unit

if TYPE_CHECKING:
    from silodp.silo.service.policy import DaemonSettings, Policy

silo = group("Make, run and inspect one silo's gate.")

PolicyFile = Annotated[Path, typer.Argument(help="The silo's policy.toml.", show_default=False)]


@silo.command()
def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder for policy, key and ledger; created if missing.", show_default=False
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="The silo's CSV, Parquet or NPZ file, or folder of images.")
    ],
    epsilon: Annotated[
        float,
        typer.Option(help="Epsilon of each record, for all queries ever."),
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
        str | None, typer.Option(help="The silo's name. By default the folder's name.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help=(
                "linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or "
                "FILE.py:FUNCTION. The policy records the file's hash."
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
            help="FILE.py:NAME. The policy records the file's hash. By default the loss of "
            "the task."
        ),
    ] = "",
    feature_map: FeatureMapName = "",
    delta: Annotated[float | None, typer.Option(help="Delta; 1/n^2 by default.")] = None,
    rule: Annotated[
        str,
        typer.Option(
            help=(
                "The ledger's rule: gdp, renyi or renyi:ORDER. Totals need gdp. It can never "
                "be changed."
            )
        ),
    ] = "gdp",
    shuffler: Annotated[
        str | None,
        typer.Option(help="The shuffler's public key, 64 hexadecimal digits."),
    ] = None,
    members: Annotated[
        int, typer.Option(help="With a shuffler: silos that take part, including this one.")
    ] = 0,
    colluding: Annotated[
        int,
        typer.Option(
            help="With --shuffler or --least: other silos that may collude with the server."
        ),
    ] = 0,
    least: Annotated[
        int,
        typer.Option(help="For masks: fewest silos in a total, including this one."),
    ] = 0,
    asker: Annotated[
        list[str] | None,
        typer.Option(
            help="A server's public key, 64 hexadecimal digits, or NAME=KEY; may be repeated."
        ),
    ] = None,
    study: Annotated[str, typer.Option(help="Name of the approved study, for its readers.")] = "",
    anchor: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with the ledger's count and head hash, if not beside the ledger. "
                "Best on another disk."
            )
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            help=(
                "Share of the records held out from training, by position in the file. "
                "Do not sort rows by a value. If a file grows, a few records move."
            )
        ),
    ] = 0.0,
    checked: Annotated[
        str,
        typer.Option(
            help=(
                "Statement that `silodp silo check` was run: DATE by NAME. It is "
                "public; the findings are not."
            )
        ),
    ] = "",
    units: Annotated[
        bool,
        typer.Option(
            "--units",
            help="Use the socket, group and courier's user of the systemd units.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Create one silo's policy, key and ledger, and check its data. Existing files are not
    overwritten.

    Example: `silodp silo init clinic --data clinic.csv --label outcome --model mlp:16 --epsilon 3`
    """
    from silodp.silo.service.masking import Masking
    from silodp.silo.service.provision import provision

    leave_no_core()
    if schema and (classes is not None or label != "label"):
        raise BadInput(
            "--schema contains the label and its classes; leave out --label and --classes"
        )
    name = name or folder.resolve().name
    if name == "silo":
        raise BadInput(
            "the silo's name would be 'silo', like its folder; set a distinct name with --name"
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
            "some --asker have a name and others do not; give each as NAME=KEY, or each as KEY"
        )
    masking = None
    if least:
        masking = Masking((), colluding, least)
    unit = {}
    if units:
        unit = for_unit("gate")
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
        **unit,
    )
    if as_json:
        return dump(asdict(made))
    say(
        f"{made.name}: {made.records} records, {len(made.features)} features, a model of "
        f"{made.parameters} parameters."
    )
    say(*(f"- {sentence}" for sentence in made.findings))
    if asker:
        say(f"Wrote {made.policy}. Read it.")
    else:
        say(f"Wrote {made.policy}. Read it, and add the server's public key to askers.")
    say(f"Give {folder / 'silo.json'} to the server's operator. silo.key and the ledger stay here.")
    if made.pseudonym:
        say(f"Give the pseudonym {made.pseudonym} only to the shuffler's operator.")
        if not colluding:
            say(
                "colluding is 0: every other member is trusted to add its noise. To "
                "tolerate c members that do not, set it to c."
            )
    if masking:
        if not colluding:
            say(
                "colluding is 0: every other silo of a total is trusted to add its "
                "noise. To tolerate c silos that do not, set it to c."
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
    """Check the silo's file before any budget is spent. Each finding names the column, the row and
    the remedy. Exit code 2 if a finding is an error, else 0.

    The check is local: it sends and stores nothing.

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
            say(f"{file} matches the schema.")
        if not stops:
            say(
                "The findings stay here. To publish that you ran the check: silodp silo attest "
                'policy.toml --by "NAME".'
            )
    if stops:
        raise typer.Exit(2)


@silo.command()
def serve(policy: PolicyFile, as_json: Json = False) -> None:
    """Answer queries on the policy's socket until SIGTERM.

    Example: `silodp silo serve clinic/policy.toml`
    """
    from silodp.silo.service import daemon

    def on_start(rules: Policy, place: DaemonSettings) -> None:
        if as_json:
            dump({"silo": rules.silo, "socket": place.socket})
        else:
            say(f"{rules.silo} answers at {place.socket}", wrap=False)

    with guarded() as stop:
        daemon.serve(policy, stop, on_start, tell=lambda words: print(words, file=sys.stderr))


@silo.command()
def pause(policy: PolicyFile, as_json: Json = False) -> None:
    """Refuse every query from now on, also after a restart, until `silodp silo resume`.

    Example: `silodp silo pause clinic/policy.toml`
    """
    _set_paused(
        policy,
        True,
        "The gate is paused. It still finishes an answer that it is computing.",
        as_json,
    )


@silo.command()
def resume(policy: PolicyFile, as_json: Json = False) -> None:
    """Answer again after a pause.

    Example: `silodp silo resume clinic/policy.toml`
    """
    _set_paused(policy, False, "The gate answers again.", as_json)


def _set_paused(policy: Path, wanted: bool, sentence: str, as_json: bool) -> None:
    from silodp.silo.service.pause import set_paused  # It needs Unix file permissions.
    from silodp.silo.service.policy import Policy

    rules = Policy.load(policy)
    set_paused(policy, wanted)
    tell({"silo": rules.silo, "paused": wanted}, as_json, sentence)


@silo.command()
def status(policy: PolicyFile, as_json: Json = False) -> None:
    """Show whether the gate runs, the epsilon spent, and the queries answered and refused.

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
    if runs:
        say(f"{rules.silo}: the gate runs, and answers at {place.socket}.")
    else:
        say(f"{rules.silo}: the gate does not run.")
    if found["paused"]:
        say("It is paused and refuses every query. `silodp silo resume` ends the pause.")
    whom = ""
    if opened.local() is not None:
        whom = " against the server"
    say(
        f"{used_of(found['used'])}: epsilon {shown(found['spent_epsilon'])} of "
        f"{rules.epsilon:g}{whom}."
    )
    refused = [f"{code} {times}" for code, times in found["refused"].items()]
    refusals = "none"
    if refused:
        refusals = f"{sum(found['refused'].values())} ({', '.join(refused)})"
    say(f"Answered {found['answered']}, repeated {found['repeated']}, refused {refusals}.")
    if not rules.answer_after:
        say(
            "Replies are sent when they are ready, so their times could reveal something about the "
            "records. Set answer_after to prevent that."
        )
    elif found["late"]:
        say(
            f"Replies are sent after {rules.answer_after:g} seconds. {found['late']} took longer, "
            "and their times could reveal something about the records. Set answer_after higher."
        )
    else:
        say(f"Replies are sent after {rules.answer_after:g} seconds. None took longer.")
    say(
        f"The ledger has {count} entries; head {head}. The policy's last day is {found['expires']}."
    )
