"""The files of a federation's folder that several commands read: its state, cards and keys, and the
problem that its silos approve.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.cli import federation_shuffle as shuffle
from silodp.core.errors import BadInput
from silodp.core.extension import is_file
from silodp.core.problem.task import Task
from silodp.host import atomic
from silodp.host.cards import schema_of
from silodp.host.extension import load
from silodp.host.schema import load_schema
from silodp.wire.hub import Direct, Hub

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from silodp.core.problem.problem import Problem
    from silodp.core.problem.schema import Schema
    from silodp.core.protocol.card import Card
    from silodp.server.order import Order
    from silodp.server.remote import Carrier

RUNS = "federation.json"
STOPPED = "stopped.json"


def carrier_of(folder: Path, state: Mapping[str, Any]) -> Carrier:
    if state["engine"] == "direct":
        return Direct(shuffle.sites(folder, state))
    return Hub(folder / "engine" / "hub.sock")


def save_state(folder: Path, state: dict[str, Any], name: str = RUNS) -> None:
    atomic.write_json(folder / name, state, durable=True)


def load_state(folder: Path) -> dict[str, Any]:
    if (state := state_in(folder.resolve(), RUNS)) is None:
        raise BadInput(
            f"no federation runs from {folder}; start one by `silodp federation up "
            f"--folder {folder}`"
        )
    return state


def state_in(folder: Path, *names: str) -> dict[str, Any] | None:
    """Read the state of a running or stopped federation, or only of the files in `names`.

    Return None if there is none. Raise BadInput if it cannot be read.
    """
    for path in (folder / name for name in names or (RUNS, STOPPED)):
        if path.exists():
            with contextlib.suppress(OSError, ValueError):
                if isinstance(found := json.loads(path.read_text("utf-8")), dict):
                    return found
            raise BadInput(f"{path} cannot be read; restore it as `silodp federation up` wrote it")
    return None


def read_key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text("ascii").strip()))
    except (OSError, ValueError):
        raise BadInput(
            f"the key {path} cannot be read; `silodp federation key` makes one, with 64 "
            "hexadecimal digits"
        ) from None


def problem_of(card: Card, order: Order, schema: Path | None = None) -> Problem:
    """Return the problem that the card names.

    A file that a card names is never run, even if it exists here. This server's own copy is needed.
    """
    if schema and load_schema(schema).text != card.schema:
        raise BadInput(
            f"the schema {schema} differs from the schema of silo {card.name}; use the same file"
        )
    read_by = schema_of(card)
    if read_by and (read_by.features, read_by.label.classes) != (card.features, card.classes):
        raise BadInput(
            f"the card of {card.name} and its schema have different features or "
            "classes; use the silo.json that `silodp silo init` wrote"
        )
    prox = None
    if is_file(order.prox):
        prox = order.prox
    words = words_of(card, model=order.model, prox=prox, feature_map=order.feature_map)
    return built(card, read_by, words | {"loss": order.loss})


def words_of(card: Card, **own: str | None) -> dict[str, str]:
    """Return each given word, or else the card's. Raise BadInput if the card's word is a file,
    which this server must give itself.
    """
    for what, given in own.items():
        if not given and is_file(named := getattr(card, what)):
            raise BadInput(
                f"the silos' {what} is {named}; give this server's own copy of it with "
                f"--{what.replace('_', '-')} FILE.py:NAME"
            )
    return {what: given or getattr(card, what) for what, given in own.items()}


def built(card: Card, schema: Schema | None, words: Mapping[str, str]) -> Problem:
    """Build the problem from these words. Its columns come from the schema, or from the card if
    there is no schema.
    """
    from silodp.core.problem.build import Words, build

    task = schema or Task.plain(len(card.classes))
    features = card.features
    if schema:
        features = schema.features
    return build(
        Words(words["model"], task, words["prox"], words["loss"], words["feature_map"]),
        len(features),
        load=load,
    )
