"""What a server's operator is told where silos approve something else than what is to be trained:
whose step is next, and the command for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.core.protocol.card import Card
from silodp.runs import RunFolder

AT_SILO = "`silodp silo approve STUDY.toml policy.toml`"
STEPS = (
    "propose it here by `silodp federation propose STUDY`, and have it approved at each silo "
    f"by {AT_SILO}: the ledgers go on"
)
MOVED = (
    "it approves another study by now, or not yet this one: take its new silo.json, or "
    f"have this one approved there by {AT_SILO}; "
    "the ledger goes on with what it has spent"
)
"""Of a gate that refuses with "model"."""
OLDER = (
    "it speaks an older version of the protocol than this server: upgrade its gate first, then "
    "resume; docs/deploy.md says which versions talk to each other"
)
"""Of a gate that refuses with "version"."""


def approves(card: Card) -> str:
    """What the silo approves, for people: the study's name, where it has one, and the model."""
    if card.study:
        return f"the study {card.study} (model {card.model})"
    return f"the model {card.model}"


def disagreement(cards: Sequence[Card]) -> str:
    """Who approves what, where the silos do not all approve the same, and what is to be done."""
    said: dict[str, list[str]] = {}
    for card in cards:
        said.setdefault(f"{approves(card)}, {card.definition[:8]}", []).append(card.name)
    listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in said.items())
    return (
        f"they approve: {listed}. Where it is not the one that is wanted, {AT_SILO} changes "
        "it, and its new silo.json goes to this server"
    )


def check_study(place: Path, cards: Sequence[Card]) -> None:
    """BadInput unless the silos still approve what the run in `place` has trained: questions about
    another model are refused.
    """
    try:
        found = json.loads(RunFolder(place).description.read_text("utf-8"))
        trained = found["cards"][0]["definition"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return  # a run of another kind, which says by itself what is wrong with it
    for card in cards:
        if card.definition != trained:
            was = found.get("study") or found["cards"][0]["model"]
            raise BadInput(
                f"the run in {place} trained {was}, and silo {card.name} by now approves "
                f"{approves(card)}, about which alone it answers. Evaluate a run of "
                f"that, or have {was} approved again: {STEPS}"
            )
