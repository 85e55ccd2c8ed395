"""A federation whose gates are in this process, for tests of the commands that ask it."""

import json
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.daemon import open_door
from silodp.silo.service.policy import DaemonSettings, Policy
from silodp.silo.service.provision import provision

ASKER = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)


class Doors:
    """A carrier to the doors of silos in this process."""

    def __init__(self, **doors):
        self.doors = doors

    def exchange(self, frames, timeout):
        return {name: self.doors[name].handle(frame) for name, frame in frames.items()}

    def names(self):
        return list(self.doors)


def write_federation(folder: Path, policies: dict[str, str]) -> None:
    """Write the files by which a command finds these silos."""
    (folder / "asker.key").write_text(ASKER.private_bytes_raw().hex())
    (folder / "federation.json").write_text(
        json.dumps({"version": 1, "engine": "direct", "silos": policies, "registry": ""})
    )


def federation_of(
    folder: Path, files: Path, names: Sequence[str], **about
) -> tuple[Doors, dict[str, DurableLedger]]:
    """Make a silo of each file NAME.csv with the schema beside it, and a federation of them in the
    folder. Return the silos' doors and ledgers.
    """
    doors = {}
    ledgers = {}
    policies = {}
    for name in names:
        made = provision(
            folder / name,
            data=files / f"{name}.csv",
            schema=files / "schema.toml",
            registry=folder / "registry",
            name=name,
            model="logistic",
            askers=[ASKER.public_key().public_bytes_raw().hex()],
            **about,
        )
        place = DaemonSettings.load(made.policy)
        ledgers[name] = DurableLedger.open(Path(place.ledger))
        policy = Policy.load(made.policy)
        doors[name], *_ = open_door(
            policy, place, None, ledgers[name], registry=folder / "registry"
        )
        policies[name] = str(made.policy)
    write_federation(folder, policies)
    return Doors(**doors), ledgers
