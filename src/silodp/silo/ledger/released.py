"""Compute the part of a chain that leaves the silo: a count and a head.

They cover charges, answers and the officer's acts alone. The whole chain also has entries that
follow from records, such as the entry that records an edit of the data set. The count and head of
the whole chain stay here, with the anchor.

Formal guarantee: count and head of this chain follow from questions, policy, the officer's acts,
the clock at the time of a charge, and fresh salts. A charge's time is taken before any record is
looked at for it. No hash of an answer, no time of an answer and no mark of records is in it. No
price is in it either, since a price may depend on when records changed. The salt of each answer is
random, so two ledgers that diverged never have the same head.
"""

from __future__ import annotations

import json

from silodp.silo.ledger.chain import Entry, LedgerSettings, hashed
from silodp.silo.ledger.closing import ACTS as OFFICERS

ACTS = ("charge", "answer", *OFFICERS)
LOCAL = ("layout", "sketch", "anchor")
"""Settings that describe the records or this machine, and so stay here."""
OF = "released"
"""The mark of a stored or signed count and head that are of this chain, not of the whole one."""

Head = tuple[int, str]


def genesis(settings: LedgerSettings) -> Head:
    """Return count and head before the first charge."""
    public = {name: value for name, value in settings.rows().items() if name not in LOCAL}
    return 0, hashed("released genesis", public)


def after(before: Head, entry: Entry) -> Head:
    """Return count and head after this entry. An entry of another act changes neither."""
    if entry.act not in ACTS:
        return before
    count, head = before
    content = [head, entry.act, entry.query_id, entry.digest, entry.run, entry.asker, entry.kind]
    if entry.act == "answer":
        content.append(str(json.loads(entry.event).get("salt", "")))
    else:
        content.append(entry.time)
    if entry.act == "charge":
        content.append(entry.event)
    return count + 1, hashed("released", content)
