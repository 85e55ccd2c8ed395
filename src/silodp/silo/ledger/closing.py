"""What an officer may write into a chain besides questions: a witness, a restored backup and what
became of it, and the move to another machine.

While a ledger is closed (restored and not yet confirmed, or moved away) nothing but the officer's
own entries may follow, so that an answer under it is an altered chain, whoever makes it. No file
and no clock are touched here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from silodp.silo.ledger.chain import Altered, Entry, hashed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ACTS = ("witness", "restore", "confirm", "write-off", "tombstone", "arrive")
RESTORED = "restored"
MOVED = "moved"
SAID = {
    RESTORED: (
        "it was restored from a backup, and answers nothing before its witness confirms it "
        "(`silodp ledger confirm`) or what is left is written off"
    ),
    MOVED: "it ends with a tombstone: its gate has moved, and this copy answers nothing any more",
}


@dataclass
class Closing:
    """Where the officer's entries leave a ledger."""

    witness: str = ""
    """A file elsewhere that has count and head too; empty for none."""
    closed: str = ""
    written_off: bool = False
    arrival: str = ""
    """The public key of the machine that a moved ledger is to arrive at."""
    restored_at: tuple[int, str] = (0, "")
    """Count and head of the backup, before the entry that says so."""

    @property
    def unknown(self) -> bool:
        """Whether answers may have been given that the chain does not have: then all of the budget
        counts as spent.
        """
        return self.written_off or self.closed == RESTORED

    def check(self, name: str, entry: Entry) -> None:
        """Altered if the entry may not follow in this state."""
        if self.closed and entry.act not in ACTS:
            raise Altered(f"{name} ({entry.act!r}) comes after the ledger was closed")
        if self.written_off and entry.act == "charge":
            raise Altered(f"{name} charges after the rest of the budget was written off")

    def note(self, entry: Entry, data: Any) -> bool:
        """Takes in an entry of the officer's, all at once or not at all; False if it is none, or
        cannot come here.
        """
        match entry.act, self.closed:
            case "witness", "" if isinstance(data["file"], str) and data["file"]:
                self.witness = data["file"]
            case "restore", "" | "restored":
                self.closed, self.restored_at = RESTORED, (entry.sequence - 1, entry.previous)
            case "confirm", "restored" if self.witness and data == {
                "witness": self.witness,
                "count": self.restored_at[0],
            }:
                self.closed = ""
            case "write-off", "" | "restored":
                self.closed = ""
                self.written_off = True
            case "tombstone", "" if holds(
                data["key"], data["signature"], "tombstone", entry.previous, data["arrival"]
            ):
                self.closed, self.arrival = MOVED, data["arrival"]
            case "arrive", "moved" if holds(
                self.arrival, data["signature"], "arrive", entry.previous
            ):
                self.closed = ""
                self.arrival = ""
            case _:
                return False
        return True


def signed(key: Ed25519PrivateKey, what: str, *about: str) -> str:
    """The signature, hexadecimal, under a statement of an officer about a head."""
    return key.sign(bytes.fromhex(hashed(what, about))).hex()


def holds(key: str, signature: str, what: str, *about: str) -> bool:
    """Whether the key signed it."""
    from silodp.core.protocol.frames import signed_by

    try:
        return signed_by(
            bytes.fromhex(key), bytes.fromhex(signature), bytes.fromhex(hashed(what, about))
        )
    except ValueError:
        return False
