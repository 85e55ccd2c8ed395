"""Define the officer's entries in a chain: witness, backup, write-off, and move.

While a ledger is closed (restored and not yet confirmed, or moved away), only the officer's own
entries may follow. A chain with an answer there counts as altered. This module
touches no file and no clock.
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
WHY_CLOSED = {
    RESTORED: (
        "it was restored from a backup, and answers nothing before its witness confirms it "
        "(`silodp ledger confirm`) or what is left is written off"
    ),
    MOVED: "it ends with a tombstone: its gate has moved, and this copy answers nothing any more",
}


@dataclass
class Closing:
    """The state of a ledger after the officer's entries."""

    witness: str = ""
    """A file elsewhere that records count and head too, or ""."""
    closed: str = ""
    written_off: bool = False
    arrival: str = ""
    """The public key of the machine that a moved ledger is to arrive at."""
    restored_at: tuple[int, str] = (0, "")
    """Count and head of the backup, before the entry `restore`."""

    @property
    def unknown(self) -> bool:
        """Return whether answers may have been given that the chain does not contain.

        Then all of the budget counts as spent.
        """
        return self.written_off or self.closed == RESTORED

    def check(self, name: str, entry: Entry) -> None:
        """Raise Altered if the entry may not follow in this state."""
        if self.closed and entry.act not in ACTS:
            raise Altered(f"{name} ({entry.act!r}) comes after the ledger was closed")
        if self.written_off and entry.act == "charge":
            raise Altered(f"{name} charges after the rest of the budget was written off")

    def note(self, entry: Entry, data: Any) -> bool:
        """Apply an entry of the officer's. Return False if it is none, or may not follow in this
        state.

        An entry is applied completely or not at all.
        """
        match entry.act, self.closed:
            case "witness", "" if isinstance(data["file"], str) and data["file"]:
                self.witness = data["file"]
            case "restore", "" | "restored":
                self.closed = RESTORED
                self.restored_at = (entry.sequence - 1, entry.previous)
            case "confirm", "restored" if self.witness and data == {
                "witness": self.witness,
                "count": self.restored_at[0],
            }:
                self.closed = ""
            case "write-off", "" | "restored":
                self.closed = ""
                self.written_off = True
            case "tombstone", "" if has_signed(
                data["key"], data["signature"], "tombstone", entry.previous, data["arrival"]
            ):
                self.closed = MOVED
                self.arrival = data["arrival"]
            case "arrive", "moved" if has_signed(
                self.arrival, data["signature"], "arrive", entry.previous
            ):
                self.closed = ""
                self.arrival = ""
            case _:
                return False
        return True


def signed(key: Ed25519PrivateKey, what: str, *words: str) -> str:
    """Return the signature, in hexadecimal, under an officer's statement about a head."""
    return key.sign(bytes.fromhex(hashed(what, words))).hex()


def has_signed(key: str, signature: str, what: str, *words: str) -> bool:
    """Return whether the key made this signature under the statement."""
    from silodp.core.protocol.frames import signed_by

    try:
        return signed_by(
            bytes.fromhex(key), bytes.fromhex(signature), bytes.fromhex(hashed(what, words))
        )
    except ValueError:
        return False
