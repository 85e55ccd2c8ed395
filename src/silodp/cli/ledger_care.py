"""`silodp ledger`, for what befalls a ledger as a whole: witnesses, backups, moves to another
machine, and what is wrong with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp.cli.console import Json, dump, put, say, tell
from silodp.cli.ledger import Anchor, LedgerFile, OutFile, ledger_at
from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.host.keys import make_key, public, read_key
from silodp.host.lock import running

KeyFile = Annotated[Path, typer.Option("--key", help="The silo's own silo.key, which signs.")]


def witness(
    path: LedgerFile,
    file: Annotated[
        Path,
        typer.Argument(
            help="A file elsewhere, best on another machine's share: it keeps count and head too."
        ),
    ],
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Appoint a witness: from now on nothing leaves before it has seen the ledger's head, and an
    older copy of ledger and anchor is refused.

    Example: `silodp ledger witness clinic/ledger.db /mnt/witness/clinic.head`
    """
    from silodp.silo.ledger import care

    care.appoint(path, file, anchor=anchor)
    tell(
        {"witness": str(file.absolute())},
        as_json,
        f"{file} is the ledger's witness; while it cannot be written, nothing is answered.",
    )


def backup(
    path: LedgerFile,
    to: Annotated[Path, typer.Argument(help="A new file for the copy.")],
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Copy the ledger whole, while its gate runs or not.

    Example: `silodp ledger backup clinic/ledger.db /mnt/backup/clinic-ledger.db`
    """
    from silodp.silo.ledger import care

    count, head = care.backup(path, to, anchor=anchor)
    tell(
        {"file": str(to), "entries": count, "head": head},
        as_json,
        f"{to} has all {count} entries; head {head}.",
    )


def restore(
    copy: Annotated[Path, typer.Argument(help="A file that `silodp ledger backup` made.")],
    path: LedgerFile,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Put a backup in the ledger's place. It answers nothing unless its witness confirms that
    nothing was answered after it. Exit code 2 then.

    Example: `silodp ledger restore /mnt/backup/clinic-ledger.db clinic/ledger.db`
    """
    from silodp.silo.ledger import care

    if path.exists() and running(str(path)):
        raise BadInput(f"a gate serves from {path}; stop it first")
    _confirmed(path, care.restore(copy, path, anchor=anchor), as_json)


def confirm(path: LedgerFile, anchor: Anchor = None, as_json: Json = False) -> None:
    """Ask the witness of a restored ledger again. Exit code 0 if it confirms the head, or 2 and why
    not.

    Example: `silodp ledger confirm clinic/ledger.db`
    """
    from silodp.silo.ledger import care

    _confirmed(path, care.confirm(path, anchor=anchor), as_json)


def write_off(
    path: LedgerFile,
    sure: Annotated[
        bool, typer.Option("--all", help="All that is left of the budget is gone for good; needed.")
    ] = False,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Write off all that is left of the budget, for a restored ledger that no witness confirms.
    What was answered may still be repeated.

    Example: `silodp ledger write-off clinic/ledger.db --all`
    """
    from silodp.silo.ledger import care

    if not sure:
        raise BadInput(
            "this writes off the whole remaining budget of these people, for good; give "
            "--all to say that you mean it"
        )
    care.write_off(path, anchor=anchor)
    tell(
        {"written_off": True},
        as_json,
        "The rest of the budget is written off; nothing new is answered.",
    )


def expect(
    key: Annotated[
        Path, typer.Argument(help="A new file for the arrival key, which stays on the new machine.")
    ],
    as_json: Json = False,
) -> None:
    """On the new machine of a gate that moves: make the key without which the moved ledger cannot
    go on, and print its public half.

    Example: `silodp ledger expect arrival.key`
    """
    made = public(make_key(key))
    tell({"arrival": made}, as_json, made)


def bury(
    path: LedgerFile,
    arrival: Annotated[
        str,
        typer.Option(
            help="What `silodp ledger expect` printed on the new machine, 64 hexadecimal digits."
        ),
    ],
    key_file: KeyFile,
    to: Annotated[
        str, typer.Option(help="Where the gate moves to, for people who read the ledger.")
    ] = "",
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """On the old machine of a gate that moves: end its ledger with a signed tombstone. It refuses
    everything from then on, for good.

    Example: `silodp ledger bury clinic/ledger.db --arrival ARRIVAL --key clinic/silo.key --to
    gate2.example.org`
    """
    from silodp.silo.ledger import care

    care.bury(path, read_key(key_file), arrival, to, anchor=anchor)
    tell(
        {"buried": True},
        as_json,
        (
            f"{path} ends with a tombstone. Copy the silo's folder to the new machine, and let "
            "it arrive there."
        ),
    )


def arrive(
    path: LedgerFile,
    key_file: Annotated[
        Path, typer.Option("--key", help="The arrival key; it is deleted once it was used.")
    ],
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """On the new machine of a gate that moves: go on with its ledger, after its tombstone.

    Example: `silodp ledger arrive clinic/ledger.db --key arrival.key`
    """
    from silodp.silo.ledger import care

    care.arrive(path, read_key(key_file), anchor=anchor)
    key_file.unlink()
    tell({"arrived": True}, as_json, f"{path} goes on here.")


def head(
    path: LedgerFile,
    key_file: KeyFile,
    out_file: OutFile = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Count and head of the ledger, signed by the silo, for other silos to co-sign. Public: each
    release says as much.

    Example: `silodp ledger head clinic/ledger.db --key clinic/silo.key --out clinic.head`
    """
    from silodp.silo.ledger import cosign

    _put(cosign.state(ledger_at(path, anchor), read_key(key_file)), out_file)


def cosign_head(
    book: Annotated[
        Path,
        typer.Argument(
            help="The book of heads that this silo has seen of others; made if it is not there."
        ),
    ],
    statement: Annotated[Path, typer.Argument(help="Another silo's signed head.")],
    key_file: KeyFile,
    out_file: OutFile = None,
    as_json: Json = False,
) -> None:
    """Co-sign another silo's head, unless its ledger went back behind what this silo has seen of
    it. Exit code 2 then.

    Example: `silodp ledger cosign heads.json north.head --key south/silo.key --out north.seen`
    """
    from silodp.silo.ledger import cosign

    _put(cosign.cosign(book, _read(statement), read_key(key_file)), out_file)


def fsck(
    path: LedgerFile,
    seen: Annotated[
        list[Path] | None,
        typer.Option(help="A head that another silo has co-signed; may be repeated."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key", help="With --seen: the silo's own silo.key.")
    ] = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """All that is wrong with a ledger, its anchor, its witness, and with what others have seen of
    it. Exit code 0 if there are only warnings.

    Example: `silodp ledger fsck clinic/ledger.db --seen clinic.seen --key clinic/silo.key`
    """
    from silodp.silo.ledger import care, cosign

    if seen and not key_file:
        raise BadInput("--seen needs --key: whose head was co-signed is seen by the silo's own key")
    found = list(care.look(path, anchor=anchor))
    if not any(not sentence.startswith("warning") for sentence in found):
        opened = ledger_at(path, anchor)
        if key_file:
            own = public(read_key(key_file))
        else:
            own = ""
        found += [
            f"{wrong}."
            for file in seen or ()
            if (wrong := cosign.contradiction(opened, _read(file), own))
        ]
    wrong = [sentence for sentence in found if not sentence.startswith("warning")]
    if as_json:
        dump(
            {
                "ok": not wrong,
                "wrong": wrong,
                "warnings": [sentence for sentence in found if sentence not in wrong],
            }
        )
    else:
        say(*(sentence[0].upper() + sentence[1:] for sentence in found))
        say(
            "Nothing else is wrong."
            if found
            else f"{path} is whole, and so is what else is known of it."
        )
    if wrong:
        raise typer.Exit(2)


def _confirmed(path: Path, why_not: str, as_json: bool) -> None:
    if as_json:
        dump({"confirmed": not why_not, "why_not": why_not})
    elif why_not:
        say(f"{path} is restored, and answers nothing: {why_not}.")
        say(
            "Either its witness confirms it (`silodp ledger confirm`), or what is left of the",
            "budget is written off (`silodp ledger write-off`).",
        )
    else:
        say(f"{path} goes on: its witness has seen its last entry, and none after it.")
    if why_not:
        raise typer.Exit(2)


def _put(statement: dict[str, Any], out_file: Path | None) -> None:
    text = json.dumps(statement) + "\n"
    put(text) if out_file is None else atomic.write(out_file, text)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        raise BadInput(
            f"{file} cannot be read; it must be what `silodp ledger head` or `silodp "
            "ledger cosign` wrote"
        ) from None
