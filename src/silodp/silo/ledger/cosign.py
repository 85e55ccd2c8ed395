"""Exchange signed heads with other silos, so that no ledger can go back unnoticed.

A silo signs its ledger's count and head. Other silos store them in a book and co-sign. The
statements are public: they have the count and head of what has left the ledger, as each release has
them. A statement of an earlier version has those of the whole chain. The two kinds are never
compared with each other. A co-signature is about the past. It proves that a ledger was rolled back
behind it. It does not prove that nothing was answered after it; a witness (in `care`) does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.host.keys import public
from silodp.silo.ledger.closing import has_signed, signed
from silodp.silo.ledger.file import now
from silodp.silo.ledger.released import OF

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from silodp.silo.ledger.durable import DurableLedger

Statement = dict[str, Any]
FIELDS = ("ledger", "count", "head", "time", "of")
"""What is signed. A statement of an earlier version lacks the last."""


def state(ledger: DurableLedger, key: Ed25519PrivateKey) -> Statement:
    """Return the head of what has left the ledger, signed by its silo."""
    count, head = ledger.released()
    fields = {
        "ledger": ledger.settings.ledger,
        "count": count,
        "head": head,
        "time": now(),
        "of": OF,
    }
    signature = signed(key, "head", *map(str, fields.values()))
    return fields | {"key": public(key), "signature": signature}


def cosign(book: Path, statement: Statement, key: Ed25519PrivateKey) -> Statement:
    """Return the statement with this witness's signature, and add it to the book.

    Raise BadInput if the ledger was rolled back, or differs from the one in the book.
    """
    _check(statement)
    try:
        if book.exists():
            statements = json.loads(book.read_text())
        else:
            statements = {}
        place = _place(statement)
        last = statements.get(place, statement)
        # The key that signed for the ledger in the other kind of statement, if there is one.
        owner = statements.get(statement["ledger"], last)["key"]
        last_key, count, head, when = (last[name] for name in ("key", "count", "head", "time"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"the book {book} cannot be read; restore it, since other silos rely on it"
        ) from None
    if {last_key, owner} != {statement["key"]}:
        raise BadInput(
            f"the ledger {statement['ledger']} was signed for by another silo before; ask "
            "its operator"
        )
    if statement["count"] < count:
        raise BadInput(
            f"the ledger was rolled back: it now has {statement['count']} entries, and had "
            f"{count} on {when}"
        )
    if statement["count"] == count and statement["head"] != head:
        raise BadInput(
            f"there are two ledgers of this name: entry {count} is not the one that was "
            f"seen on {when}"
        )
    atomic.write(book, json.dumps(statements | {place: statement}, indent=1) + "\n")
    return statement | {
        "witness": public(key),
        "cosignature": signed(key, "cosigned", statement["signature"]),
    }


def contradiction(ledger: DurableLedger, statement: Statement, key: str) -> str:
    """Return how the ledger contradicts a co-signed head of the silo with this public key, or "".

    Raise BadInput if the statement is not co-signed, or is not about this ledger and key.
    """
    _check(statement)
    if not has_signed(
        str(statement.get("witness")),
        str(statement.get("cosignature")),
        "cosigned",
        statement["signature"],
    ):
        raise BadInput(
            "the statement is not co-signed: the witness must sign it (`silodp ledger cosign`)"
        )
    if statement["ledger"] != ledger.settings.ledger or statement["key"] != key:
        raise BadInput("the statement is about another ledger, or signed by another silo's key")
    if "of" in statement:
        heads = [head for _, head in ledger.released_heads()]
    else:
        heads = [ledger.settings.genesis, *(entry.hash for entry in ledger.entries())]
    if statement["count"] >= len(heads):
        return (
            f"it has {len(heads) - 1} entries, but {statement['witness']} has seen "
            f"{statement['count']} of them: ledger and anchor were rolled back"
        )
    if heads[statement["count"]] == statement["head"]:
        return ""
    return f"its entry {statement['count']} is not the one that {statement['witness']} has seen"


def _place(statement: Statement) -> str:
    """Return the key of the ledger in the book. Heads of the two kinds have different keys."""
    if "of" in statement:
        return f"{statement['ledger']} {OF}"
    return statement["ledger"]


def _check(statement: Any) -> None:
    """Raise BadInput unless the statement is a head that its silo signed."""
    try:
        signed_fields = FIELDS if "of" in statement else FIELDS[:4]
        values = [str(statement[name]) for name in signed_fields]
        valid = (
            statement.get("of", OF) == OF
            and isinstance(statement["count"], int)
            and statement["count"] >= 0
            and has_signed(statement["key"], statement["signature"], "head", *values)
        )
    except (KeyError, TypeError):
        valid = False
    if not valid:
        raise BadInput(
            "the statement is not a ledger's head signed by its silo; take what `silodp "
            "ledger head` wrote"
        )
