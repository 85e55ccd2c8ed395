"""Make a shuffler's settings, keys and empty store, and enrol its members."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from silodp.core.errors import BadInput
from silodp.host.atomic import new_files, write
from silodp.host.keys import key_text, public
from silodp.host.site import COMMENTS as SITE_COMMENTS
from silodp.host.site import DEFAULTS as SITE_DEFAULTS
from silodp.host.tables import table_text, toml
from silodp.shuffler.settings import ShufflerSettings
from silodp.shuffler.store import RoundStore

COMMENTS = {
    "askers": (
        "Ed25519 public keys, 64 hexadecimal digits each, of the servers that may ask for totals."
    ),
    "roster": (
        "The members' pseudonyms, 64 hexadecimal digits each, as the silos themselves have "
        "given them to you. No names."
    ),
    "rounds_per_hour": "Totals that are passed on in an hour, at most.",
    "seal_key": "The key that opens the silos' boxes. It stays here.",
    "sign_key": "The key that signs totals. It stays here.",
    "store": (
        "The rounds that have been passed on. It is never made again, nor restored from a copy: "
        "if it is lost, make another shuffler."
    ),
    "log": "Rounds, and how many boxes were dropped and why; no numbers.",
    **SITE_COMMENTS,
    "maximum_frame": "Bytes of a request, at most.",
}


def provision(
    folder: Path, *, askers: Sequence[str], members: Sequence[str], **changes: Any
) -> dict[str, str]:
    """Make shuffler.toml, two keys, an empty store and shuffler.json. Return the public keys.

    Raise BadInput if a value or a path cannot be used. Members need these keys to have pseudonyms.
    So without `members` the roster is written empty, and `serve` refuses it until it has members.
    `changes` are other values for fields of the settings, such as socket_group or rounds_per_hour.
    """
    # Two placeholders pass the checks of a roster that is written empty below.
    roster = tuple(members) or ("0" * 64, "1" * 64)
    defaults: dict[str, Any] = {
        "askers": tuple(askers),
        "roster": roster,
        "rounds_per_hour": 1000,
        "seal_key": "seal.key",
        "sign_key": "sign.key",
        "store": "rounds.db",
        "log": "shuffler.log",
        "socket": "shuffler.sock",
        **SITE_DEFAULTS,
    }
    settings = ShufflerSettings.of(defaults | changes)
    seal = X25519PrivateKey.generate()
    sign = Ed25519PrivateKey.generate()
    card = {"seal": public(seal), "sign": public(sign)}
    files = {
        "shuffler.toml": table_text(asdict(settings) | {"roster": tuple(members)}, COMMENTS),
        settings.seal_key: key_text(seal),
        settings.sign_key: key_text(sign),
        settings.store: "",
        "shuffler.json": json.dumps(card) + "\n",
    }
    with new_files(folder, files):
        RoundStore.create(folder / settings.store, **card)
    return card


def enrol(path: Path, members: Sequence[str]) -> int:
    """Add pseudonyms to the roster in a settings file. Return the size of the roster.

    Raise BadInput if the file cannot be read or changed. A running shuffler reads it at its next
    start.
    """
    try:
        text = path.read_text("utf-8")
        table = tomllib.loads(text)
        roster = tuple(dict.fromkeys((*table["roster"], *members)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"settings {str(path)!r} cannot be read ({type(error).__name__}); give a "
            "shuffler's shuffler.toml"
        ) from None
    ShufflerSettings.of(table | {"roster": roster})
    new, lines = re.subn(r"^roster = \[.*\]$", f"roster = {toml(roster)}", text, flags=re.MULTILINE)
    if lines != 1 or tomllib.loads(new) != table | {"roster": [*roster]}:
        raise BadInput(
            f"settings {str(path)!r} have no line of the form 'roster = [...]'; write the "
            "pseudonyms into them by hand"
        )
    write(path, new)
    return len(roster)
