"""Messages to a server's operator about what the silos approve: who must act next, and the
command.
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
    f"by {AT_SILO}: the ledgers stay"
)
MOVED = (
    "it approves another study, or has not approved this one yet: take its new silo.json, or "
    f"have this one approved there by {AT_SILO}; its ledger keeps what was spent"
)
"""Advice for a gate that refuses with "model"."""
OLDER = (
    "it has an older version of the protocol than this server: upgrade its gate first, then "
    "resume; docs/day-two.md lists the versions that work together"
)
"""Advice for a gate that refuses with "version"."""


def approves(card: Card) -> str:
    """Return what the silo approves, for a message: the model, and the name of the study if it has
    one.
    """
    if card.study:
        return f"the study {card.study} (model {card.model})"
    return f"the model {card.model}"


def disagreement(cards: Sequence[Card]) -> str:
    """Return a sentence that lists what each silo approves, and what to do."""
    silos_of: dict[str, list[str]] = {}
    for card in cards:
        approved = f"{approves(card)}, {card.definition[:8]}"
        silos_of.setdefault(approved, []).append(card.name)
    listed = "; ".join(f"{approved}: {', '.join(names)}" for approved, names in silos_of.items())
    return (
        f"they approve: {listed}. If a silo approves another one than you want, change it there "
        f"by {AT_SILO}, and send its new silo.json to this server"
    )


def check_study(place: Path, cards: Sequence[Card]) -> None:
    """Raise BadInput unless the silos still approve the model that the run in `place` has trained.

    A gate refuses questions about another model. A file that is not a run's description passes
    here: the code that reads it has the message.
    """
    try:
        description = json.loads(RunFolder(place).description.read_text("utf-8"))
        trained = description["cards"][0]["definition"]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return
    for card in cards:
        if card.definition != trained:
            was = description.get("study") or description["cards"][0]["model"]
            raise BadInput(
                f"the run in {place} trained {was}, and silo {card.name} now approves "
                f"{approves(card)} and answers no questions about another model. Evaluate a run "
                f"of the approved model, or have {was} approved again: {STEPS}"
            )
