"""Read a shuffler's settings, one TOML file: askers, members and socket.

Members are pseudonyms. No silo has a name here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.host.site import Site
from silodp.host.tables import beside, check_keys, check_text, check_whole, of_table, read_toml


@dataclass(frozen=True)
class ShufflerSettings(Site):
    """A shuffler's settings, made by `load` or `of`, which raise BadInput with what is wrong."""

    askers: tuple[str, ...]
    roster: tuple[str, ...]
    rounds_per_hour: int
    seal_key: str
    sign_key: str
    store: str

    def __post_init__(self) -> None:
        for name, least in (("askers", 1), ("roster", 2)):
            keys = getattr(self, name)
            check_keys("settings", name, keys, least)
            if len(set(keys)) < len(keys):
                raise BadInput(f"settings: {name} has a key twice; list each key once")
        for name in ("seal_key", "sign_key", "store"):
            check_text("settings", name, getattr(self, name), r"[^\0\n]{1,4096}", "a path")
        self.check("settings")
        check_whole("settings", "rounds_per_hour", self.rounds_per_hour, 1, 2**31)

    @classmethod
    def load(cls, path: str | Path) -> ShufflerSettings:
        """Return the settings in a TOML file, with paths taken from its own folder.

        Raise BadInput with the name of a field that cannot be used.
        """
        return beside(
            path,
            cls.of(read_toml("settings", path)),
            ("seal_key", "sign_key", "store", "log", "socket"),
        )

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> ShufflerSettings:
        """Return the settings in a table. Raise BadInput if a field is missing or unknown."""
        return of_table("settings", cls, table)
