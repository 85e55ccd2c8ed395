"""Heads that other silos have seen: a silo signs its ledger's count and head, others keep them in a
book and co-sign, and none goes back.

What is exchanged is public: count and head of what has left the ledger, as each release has them.
A statement of an earlier version has those of the whole chain; the two kinds are never compared
with each other. A co-signature is of the past: it shows that a ledger was rolled back behind it,
and does not show that nothing was answered after it (a witness, in `care`, does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.host.keys import public
from silodp.silo.ledger.closing import holds, signed
from silodp.silo.ledger.file import now
from silodp.silo.ledger.released import OF

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from silodp.silo.ledger.durable import DurableLedger

Statement = dict[str, Any]
FIELDS = ("ledger", "count", "head", "time", "of")
"""What is signed. A statement of an earlier version lacks the last."""


def state(ledger: DurableLedger, key: Ed25519PrivateKey) -> Statement:
    """The head of what has left the ledger, signed by its silo."""
    count, head = ledger.released()
    about = {
        "ledger": ledger.settings.ledger,
        "count": count,
        "head": head,
        "time": now(),
        "of": OF,
    }
    return about | {"key": public(key), "signature": signed(key, "head", *map(str, about.values()))}


def cosign(book: Path, statement: Statement, own: Ed25519PrivateKey) -> Statement:
    """The statement with this witness's signature; BadInput if the ledger has gone back behind, or
    beside, what the book has seen of it.
    """
    _check(statement)
    try:
        if book.exists():
            seen = json.loads(book.read_text())
        else:
            seen = {}
        place = _place(statement)
        last = seen.get(place, statement)
        owner = seen.get(statement["ledger"], last)["key"]
        key_then, count, head, when = (last[name] for name in ("key", "count", "head", "time"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"the book {book} cannot be read; restore it, since it is what the others rely on"
        ) from None
    if {key_then, owner} != {statement["key"]}:
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
    atomic.write(book, json.dumps(seen | {place: statement}, indent=1) + "\n")
    return statement | {
        "witness": public(own),
        "cosignature": signed(own, "cosigned", statement["signature"]),
    }


def contradiction(ledger: DurableLedger, statement: Statement, key: str) -> str:
    """How the ledger contradicts a co-signed head of the silo with this public key; empty if it
    does not.
    """
    _check(statement)
    if not holds(
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
    """By which the book knows the ledger: heads of the two kinds stand beside one another."""
    if "of" in statement:
        return f"{statement['ledger']} {OF}"
    return statement["ledger"]


def _check(statement: Any) -> None:
    try:
        about = [str(statement[name]) for name in FIELDS[: 5 if "of" in statement else 4]]
        fine = (
            statement.get("of", OF) == OF
            and isinstance(statement["count"], int)
            and statement["count"] >= 0
            and holds(statement["key"], statement["signature"], "head", *about)
        )
    except (KeyError, TypeError):
        fine = False
    if not fine:
        raise BadInput(
            "the statement is not a ledger's head signed by its silo; take what `silodp "
            "ledger head` wrote"
        )
