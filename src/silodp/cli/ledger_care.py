"""`silodp ledger` for a ledger as a whole: witnesses, backups, moves to another machine, and
faults.
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
from silodp.host.portable import running

KeyFile = Annotated[Path, typer.Option("--key", help="The silo's own silo.key, which signs.")]


def witness(
    path: LedgerFile,
    file: Annotated[
        Path,
        typer.Argument(
            help="A file elsewhere, best on another machine's share. It also records count "
            "and head."
        ),
    ],
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Appoint a witness. From now on no answer leaves before the witness has recorded the ledger's
    head, and an older copy of ledger and anchor is refused.

    Example: `silodp ledger witness clinic/ledger.db /mnt/witness/clinic.head`
    """
    from silodp.silo.ledger import care

    care.appoint(path, file, anchor=anchor)
    tell(
        {"witness": str(file.absolute())},
        as_json,
        f"{file} is the ledger's witness. While it cannot be written, the gate answers no query.",
    )


def backup(
    path: LedgerFile,
    to: Annotated[Path, typer.Argument(help="A new file for the copy.")],
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Copy the whole ledger, even while its gate runs.

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
    """Replace the ledger by a backup. It answers only if its witness confirms that there were no
    later answers. Otherwise the exit code is 2.

    Example: `silodp ledger restore /mnt/backup/clinic-ledger.db clinic/ledger.db`
    """
    from silodp.silo.ledger import care

    if path.exists() and running(str(path)):
        raise BadInput(f"a running gate uses {path}; stop the gate first")
    _confirmed(path, care.restore(copy, path, anchor=anchor), as_json)


def confirm(path: LedgerFile, anchor: Anchor = None, as_json: Json = False) -> None:
    """Ask the witness of a restored ledger again. Exit code 0 if it confirms the head, or 2 with
    the reason.

    Example: `silodp ledger confirm clinic/ledger.db`
    """
    from silodp.silo.ledger import care

    _confirmed(path, care.confirm(path, anchor=anchor), as_json)


def write_off(
    path: LedgerFile,
    sure: Annotated[
        bool,
        typer.Option(
            "--all", help="Required: confirms that the rest of the budget is lost for good."
        ),
    ] = False,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Write off the rest of the budget, for a restored ledger that no witness confirms. Earlier
    answers may still be repeated.

    Example: `silodp ledger write-off clinic/ledger.db --all`
    """
    from silodp.silo.ledger import care

    if not sure:
        raise BadInput(
            "this writes off the whole remaining budget of these people for good; give "
            "--all to confirm"
        )
    care.write_off(path, anchor=anchor)
    tell(
        {"written_off": True},
        as_json,
        "The rest of the budget is written off. The gate answers no new query.",
    )


def expect(
    key: Annotated[
        Path, typer.Argument(help="A new file for the arrival key. It stays on the new machine.")
    ],
    as_json: Json = False,
) -> None:
    """Create the arrival key on the new machine of a gate that moves, and print its public half.
    The moved ledger cannot continue without this key.

    Example: `silodp ledger expect arrival.key`
    """
    made = public(make_key(key))
    tell({"arrival": made}, as_json, made)


def bury(
    path: LedgerFile,
    arrival: Annotated[
        str,
        typer.Option(
            help="Output of `silodp ledger expect` on the new machine, 64 hexadecimal digits."
        ),
    ],
    key_file: KeyFile,
    to: Annotated[str, typer.Option(help="New place of the gate, for readers of the ledger.")] = "",
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """End the ledger of a gate that moves, on its old machine, with a signed tombstone. From then
    on it refuses every query, for good.

    Example: `silodp ledger bury clinic/ledger.db --arrival ARRIVAL --key clinic/silo.key --to
    gate2.example.org`
    """
    from silodp.silo.ledger import care

    care.bury(path, read_key(key_file), arrival, to, anchor=anchor)
    tell(
        {"buried": True},
        as_json,
        (
            f"{path} ends with a tombstone. Copy the silo's folder to the new machine, "
            "and run `silodp ledger arrive` there."
        ),
    )


def arrive(
    path: LedgerFile,
    key_file: Annotated[
        Path, typer.Option("--key", help="The arrival key. It is deleted after use.")
    ],
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Continue the ledger of a gate that moves, on its new machine, after the tombstone.

    Example: `silodp ledger arrive clinic/ledger.db --key arrival.key`
    """
    from silodp.silo.ledger import care

    care.arrive(path, read_key(key_file), anchor=anchor)
    key_file.unlink()
    tell({"arrived": True}, as_json, f"{path} continues here.")


def head(
    path: LedgerFile,
    key_file: KeyFile,
    out_file: OutFile = None,
    anchor: Anchor = None,
    as_json: Json = False,
) -> None:
    """Print count and head of the ledger, signed by the silo, for other silos to co-sign. They are
    public: each release contains them.

    Example: `silodp ledger head clinic/ledger.db --key clinic/silo.key --out clinic.head`
    """
    from silodp.silo.ledger import cosign

    _put(cosign.state(ledger_at(path, anchor), read_key(key_file)), out_file)


def cosign_head(
    book: Annotated[
        Path,
        typer.Argument(help="This silo's book of other silos' heads, created if missing."),
    ],
    statement: Annotated[Path, typer.Argument(help="Another silo's signed head.")],
    key_file: KeyFile,
    out_file: OutFile = None,
    as_json: Json = False,
) -> None:
    """Co-sign another silo's head. Exit code 2 if that ledger was rolled back to before a head in
    this silo's book.

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
    """List all faults of a ledger, its anchor and its witness, and contradictions with co-signed
    heads. Exit code 0 if there are only warnings.

    Example: `silodp ledger fsck clinic/ledger.db --seen clinic.seen --key clinic/silo.key`
    """
    from silodp.silo.ledger import care, cosign

    if seen and not key_file:
        raise BadInput("--seen needs --key, the silo's own key, to find its co-signed heads")
    found = list(care.look(path, anchor=anchor))
    if not any(not sentence.startswith("warning") for sentence in found):
        opened = ledger_at(path, anchor)
        own = ""
        if key_file:
            own = public(read_key(key_file))
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
        if found:
            say("There are no other faults.")
        else:
            say(f"{path} is whole, and all checked copies of its head match.")
    if wrong:
        raise typer.Exit(2)


def _confirmed(path: Path, why_not: str, as_json: bool) -> None:
    if as_json:
        dump({"confirmed": not why_not, "why_not": why_not})
    elif why_not:
        say(f"{path} is restored but answers no query: {why_not}.")
        say(
            "Ask its witness again (`silodp ledger confirm`), or write off the rest of the budget "
            "(`silodp ledger write-off`)."
        )
    else:
        say(f"{path} continues: its witness has recorded its last entry, and none after it.")
    if why_not:
        raise typer.Exit(2)


def _put(statement: dict[str, Any], out_file: Path | None) -> None:
    text = json.dumps(statement) + "\n"
    if out_file is None:
        put(text)
    else:
        atomic.write(out_file, text)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        raise BadInput(
            f"{file} cannot be read; give a file that `silodp ledger head` or `silodp "
            "ledger cosign` wrote"
        ) from None
