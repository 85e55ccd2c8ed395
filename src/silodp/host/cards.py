"""Read a silo's card, the silo.json that `silodp silo init` writes.

The silo sends it to the server and to other silos.
"""

from __future__ import annotations

import json
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.core.protocol.card import Card


def read_card(path: Path) -> Card:
    """Return the card in a file. Raise BadInput if it cannot be read."""
    try:
        return Card.of(json.loads(path.read_text("utf-8")), str(path))
    except BadInput:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(
            f"the card {path} cannot be read ({type(error).__name__}); it has to be the "
            "silo.json that `silodp silo init` wrote"
        ) from None


def schema_of(card: Card) -> Schema | None:
    """Return the public schema by which the silo reads its file, or None if it has none."""
    if card.schema:
        return Schema.parse(card.schema, f"the card of {card.name}")
    return None
