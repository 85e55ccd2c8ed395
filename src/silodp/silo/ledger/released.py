"""What of a chain leaves the silo: a count and a head of charges, answers and the officer's acts
alone.

The whole chain also has entries that follow from records, such as the one that says that the data
set was edited. Its count and head stay here, with the anchor. Formal guarantee: count and head of
this chain follow from questions, policy, the officer's acts, the clock at the time of a charge, and
fresh salts. A charge's time is taken before any record is looked at for it. No hash of an answer,
no time of an answer and no mark of records is in it, and no price, since a price may depend on when
records changed. The salt of each answer makes it unforeseeable, so that two ledgers that went
different ways never have the same head.
"""

from __future__ import annotations

import json

from silodp.silo.ledger.chain import Entry, LedgerSettings, hashed
from silodp.silo.ledger.closing import ACTS as OFFICERS

ACTS = ("charge", "answer", *OFFICERS)
LOCAL = ("layout", "sketch", "anchor")
"""Settings that are of the records or of this machine."""
OF = "released"
"""By which a count and a head that were kept or signed are known for those of this chain."""

Head = tuple[int, str]


def genesis(settings: LedgerSettings) -> Head:
    """Count and head before anything was charged."""
    public = {name: value for name, value in settings.rows().items() if name not in LOCAL}
    return 0, hashed("released genesis", public)


def after(before: Head, entry: Entry) -> Head:
    """Count and head once this entry has come; as they were, where it is of another act."""
    if entry.act not in ACTS:
        return before
    count, head = before
    about = [head, entry.act, entry.query_id, entry.digest, entry.run, entry.asker, entry.kind]
    if entry.act == "answer":
        about.append(str(json.loads(entry.event).get("salt", "")))
    else:
        about.append(entry.time)
    if entry.act == "charge":
        about.append(entry.event)
    return count + 1, hashed("released", about)
