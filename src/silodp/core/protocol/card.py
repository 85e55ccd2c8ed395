"""A silo's public card: what it tells of itself, written by the silo and read by the server."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.text import LONGEST, is_line, is_name, visible

PARTS = ("held_out", "colluding")
"""Of a card's whole numbers those that may be 0, and are below the number of records."""
MOST = 2**53
"""The largest whole number of a card."""
SHAPES = {
    "name": r"[A-Za-z0-9._-]{1,64}",
    "key": r"[0-9a-f]{64}",
    "definition": r"[0-9a-f]{64}",
    "rule": r"[a-z]{1,64}",
    "study": r"[A-Za-z0-9._-]{0,64}",
    "trust": r"isrl|masks|shuffle",
}
"""The pattern of each short text of a card. Its other texts are lines without controls."""
FEATURE = 2 * LONGEST + 10
"""Characters of a feature's name: a column's name, "=" and a category, or " missing"."""
JSON_TEXTS = ("schema",)
"""Texts of a card that another parser checks."""


@dataclass(frozen=True)
class Card:
    """What a silo tells the server's operator of itself (silo.json): all of it public, none of it
    taken on trust by the silo.
    """

    name: str
    key: str
    records: int
    epsilon: float
    delta: float
    rule: str
    model: str
    prox: str
    features: tuple[str, ...]
    classes: tuple[str, ...]
    parameters: int
    definition: str
    schema: str = dataclasses.field(default="", kw_only=True)
    """The public schema's one spelling, where the silo reads its file by one."""
    feature_map: str = dataclasses.field(default="", kw_only=True)
    """What the model sees of a record, where that is not the record itself."""
    held_out: int = dataclasses.field(default=0, kw_only=True)
    """Records that no training question sees and a Score is over; older cards say nothing of them.
    """
    checked: str = dataclasses.field(default="", kw_only=True)
    """By whom and when the silo's officer says that `silodp silo check` was run; never what it
    found.
    """
    study: str = dataclasses.field(default="", kw_only=True)
    """The name of the study that the silo approves, for people."""
    statistics: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    """What the policy allowed to be asked when the card was written; older cards say nothing of it.
    """
    colluding: int = dataclasses.field(default=0, kw_only=True)
    """Under masks: against how many other silos with the server its price must hold."""
    trust: str = dataclasses.field(default="isrl", kw_only=True)
    """What the silo's policy is made for: its own answers, masked totals, or a shuffler's."""

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "the card") -> Card:
        """The card in a table as silo.json holds it; BadInput names the field that cannot be
        used.
        """
        found: dict[str, Any] = {}
        for field in fields(cls):
            value = table.get(
                field.name, None if field.default is dataclasses.MISSING else field.default
            )
            match field.type, value:
                case "tuple[str, ...]", list() | tuple() if all(
                    is_name(item, FEATURE) for item in value
                ):
                    found[field.name] = tuple(value)
                case "int", int() if type(value) is int and (
                    0 <= value < found["records"] if field.name in PARTS else 0 < value <= MOST
                ):
                    found[field.name] = value
                case "float", int() | float() if type(value) is not bool and value > 0:
                    found[field.name] = float(value)
                case "str", str() if _fits(field.name, value):
                    found[field.name] = value
                case _:
                    raise BadInput(
                        f"{source} has the {field.name} {visible(repr(value), 60)}; take the "
                        "silo.json that `silodp silo init` wrote"
                    )
        return cls(**found)


def _fits(field: str, text: str) -> bool:
    """Return whether a text may stand in this field, so that no card steers the reader's screen."""
    if field in SHAPES:
        return re.fullmatch(SHAPES[field], text, re.ASCII) is not None
    return field in JSON_TEXTS or is_line(text)
