"""`silodp silo key` and `silodp silo trust`: officers tell each other who they are, in words, before their silos count on each other's noise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from silodp.cli.console import Json, dump, say
from silodp.cli.silo import PolicyFile, silo
from silodp.core.errors import BadInput


@silo.command()
def key(policy: PolicyFile, as_json: Json = False) -> None:
    """The silo's own key, and its 16 words, to read to the officers of the other silos over the telephone.

    Example: `silodp silo key clinic/policy.toml`
    """
    from silodp.core.protocol.words import fingerprint
    from silodp.host.keys import public, read_key
    from silodp.host.tables import read_toml
    from silodp.silo.service.policy import Place

    name, own = read_toml("policy", policy).get("silo"), public(read_key(Place.load(policy).key))  # askers may still be missing
    if as_json:
        return dump({"silo": name, "key": own, "words": fingerprint(own)})
    say(f"{name}: {own}", f"Its words: {fingerprint(own)}")


@silo.command()
def trust(
    policy: PolicyFile,
    other: Annotated[Path, typer.Argument(help="The other silo's silo.json, however it came here.", show_default=False)],
    words: Annotated[
        str | None, typer.Option(help="The 16 words that its officer has read to you; without them nothing is pinned.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pin another silo's key, by the words that its officer reads to you, so that it may be in a masked total with this one.

    Whoever brought the silo.json could have put a key of his own into it, and would then read this silo's counts: the words tell.

    Example: `silodp silo trust clinic/policy.toml other.json --words "acid acorn ..."`
    """
    from silodp.core.protocol.words import fingerprint
    from silodp.host.cards import read_card
    from silodp.host.keys import public, read_key
    from silodp.silo.service.masking import pin
    from silodp.silo.service.policy import Place

    card = read_card(other)
    if card.key == public(read_key(Place.load(policy).key)):
        raise BadInput(f"{other} has the key of this silo itself; give the silo.json of OTHER, a silo with which it is in a total")
    wanted = fingerprint(card.key)
    if words is not None and words.lower().split() != wanted.split():
        raise BadInput(
            f"these are not the words of the key in {other}; nothing is pinned: ask {card.name}'s officer for its silo.json again"
        )
    masking = pin(policy, [f"{card.name} {card.key}"]) if words is not None else None
    if as_json:
        return dump({"silo": card.name, "key": card.key, "pinned": masking is not None})
    if masking is None:  # the words that the card would need are not shown: whoever copied them here would pin what was brought
        return say(
            f"{card.name}: {card.key}",
            "Nothing is pinned yet. Call its officer, have the 16 words of `silodp silo key` read to you, and give them with --words.",
        )
    say(f"{card.name} is pinned; {len(masking.members)} other silos may be in a total with this one. Start the gate again to let it know.")
