"""Read a silo's public card: the facts about itself that the silo writes and the server reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.text import LONGEST, is_line, is_name, visible

PARTS = ("held_out", "colluding")
"""The integers of a card that may be 0. They are below the number of records."""
MOST = 2**53
"""The largest integer of a card."""
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
"""The longest name of a feature, in characters.

It is a column's name with "=" and a category, or with " missing".
"""
JSON_TEXTS = ("schema",)
"""The texts of a card that another parser checks."""


@dataclass(frozen=True)
class Card:
    """What a silo publishes about itself for the server's operator (silo.json).

    All of it is public. The silo takes none of it on trust from the server.
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
    """The public schema in its one spelling, if the silo reads its file by a schema."""
    feature_map: str = dataclasses.field(default="", kw_only=True)
    """The feature map of the model, if it does not see the record itself."""
    held_out: int = dataclasses.field(default=0, kw_only=True)
    """The records that no training query uses, and over which a Score is. Older cards lack it."""
    checked: str = dataclasses.field(default="", kw_only=True)
    """Who ran `silodp silo check` and when, by the silo's officer; never what it found."""
    study: str = dataclasses.field(default="", kw_only=True)
    """The name of the study that the silo approves, for people."""
    statistics: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    """The statistics that the policy allowed when the card was written. Older cards lack it."""
    colluding: int = dataclasses.field(default=0, kw_only=True)
    """Under masks, the number of silos that may collude with the server without harm."""

    trust: str = dataclasses.field(default="isrl", kw_only=True)
    """What the silo's policy is made for: its own answers, masked totals, or a shuffler's."""

    @classmethod
    def of(cls, table: Mapping[str, Any], source: str = "the card") -> Card:
        """Return the card in a table with the fields of silo.json.

        Raise BadInput with the name of the first field that cannot be used.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            default = field.default
            if default is dataclasses.MISSING:
                default = None
            value = table.get(field.name, default)
            match field.type, value:
                case "tuple[str, ...]", list() | tuple() if all(
                    is_name(item, FEATURE) for item in value
                ):
                    values[field.name] = tuple(value)
                case "int", int() if type(value) is int and _in_range(field.name, value, values):
                    values[field.name] = value
                case "float", int() | float() if type(value) is not bool and value > 0:
                    values[field.name] = float(value)
                case "str", str() if _fits(field.name, value):
                    values[field.name] = value
                case _:
                    raise BadInput(
                        f"{source} has the {field.name} {visible(repr(value), 60)}; take the "
                        "silo.json that `silodp silo init` wrote"
                    )
        return cls(**values)


def _in_range(field: str, value: int, earlier: Mapping[str, Any]) -> bool:
    """Return whether an integer may be in this field, given the fields before it."""
    if field in PARTS:
        return 0 <= value < earlier["records"]
    return 0 < value <= MOST


def _fits(field: str, text: str) -> bool:
    """Return whether a text may stand in this field, so that no card steers the reader's screen."""
    if field in SHAPES:
        return re.fullmatch(SHAPES[field], text, re.ASCII) is not None
    return field in JSON_TEXTS or is_line(text)
