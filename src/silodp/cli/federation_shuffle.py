"""A shuffler among the processes of `silodp federation`: its keys and roster, and its daemons and
sites.

Here one user makes all folders, so keys and pseudonyms pass between them directly. In a real
deployment silos and shuffler exchange them, never through the server (docs/deploy-reference.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from silodp.core.errors import BadInput

if TYPE_CHECKING:
    from silodp.server.remote_shuffled import Shuffler

SITE = "shuffler"
SETTINGS = "shuffler/shuffler.toml"


def totals(
    trust: str, folder: Path, files: Mapping[str, Path], asker: str, colluding: int, **reading: Any
) -> dict[str, Any]:
    """Return what each silo's own `provision` needs for totals.

    For masks, `acquaint` adds the other silos once all are made. For a shuffle, the shuffler is
    made here. `reading` states how the files are read. Raise BadInput for unsuitable silos.
    """
    if trust == "shuffle" and SITE in files:
        raise BadInput(f"a silo is named {SITE!r}, which is the shuffler's name; rename its file")
    if (trust == "masks" or colluding) and len(files) < colluding + 2:
        raise BadInput(
            f"{len(files)} silos with {colluding} colluding are too few to hide one "
            f"silo's answer; use {colluding + 2} silos or more"
        )
    counts = [_records(path, **reading) for path in files.values()]
    about = {"delta": 1 / max(2, *counts) ** 2}
    if trust == "masks":
        from silodp.silo.service.masking import Masking

        return about | {"masking": Masking((), colluding, colluding + 2)}
    from silodp.shuffler.provision import provision

    card = provision(folder / SITE, askers=[asker], members=(), rounds_per_hour=100_000)
    return about | {"shuffler": card["seal"], "members": len(files), "colluding": colluding}


def acquaint(members: Mapping[str, tuple[str, str]]) -> None:
    """Pin each silo's (policy, key) at all others. Elsewhere officers compare the keys by
    telephone.
    """
    from silodp.silo.service.masking import pin

    for name, (policy, _) in members.items():
        pin(
            Path(policy), [f"{other} {key}" for other, (_, key) in members.items() if other != name]
        )


def _records(
    path: Path,
    *,
    label: str,
    classes: Sequence[str] | None,
    model: str,
    prox: str,
    feature_map: str,
    schema: Path | None,
) -> int:
    from silodp.silo.data.reading import find_schema, read_records
    from silodp.silo.service.policy import DaemonSettings
    from silodp.silo.service.provision import _by, _place

    place = DaemonSettings(
        **_place(path, label, classes, model, prox, feature_map=feature_map) | _by(schema)
    )
    return len(read_records(place, find_schema(place)).y)


def sites(folder: Path, state: Mapping[str, Any]) -> dict[str, Path]:
    """Return the socket behind each courier, by the name of its site."""
    found = {name: Path(policy).parent / "gate.sock" for name, policy in state["silos"].items()}
    if state.get("shuffler"):
        found[SITE] = folder / SITE / "shuffler.sock"
    return found


def daemons(state: Mapping[str, Any]) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return (the command's words, its settings) of each daemon, by the name of its process."""
    found: dict[str, tuple[tuple[str, ...], str]] = {
        f"gate {name}": (("silo", "serve"), policy) for name, policy in state["silos"].items()
    }
    if state.get("shuffler"):
        found["shuffler daemon"] = (("federation", "shuffler", "serve"), state["shuffler"])
    return found


def shuffler_card(path: Path) -> Shuffler:
    from silodp.server.remote_shuffled import Shuffler

    try:
        return Shuffler.of(json.loads(path.read_text("utf-8")), str(path))
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(
            f"the card {path} cannot be read ({type(error).__name__}); give the "
            "shuffler.json of a shuffler"
        ) from None
