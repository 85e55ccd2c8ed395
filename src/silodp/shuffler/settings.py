"""A shuffler's settings, one TOML file: who may ask, who is a member, where it listens. Members are
pseudonyms; no silo has a name here.
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
    """Made by `load` or `of`, which say in a sentence what is wrong with a file."""

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
                raise BadInput(f"settings: {name} names a key twice; each must be another's")
        for name in ("seal_key", "sign_key", "store"):
            check_text("settings", name, getattr(self, name), r"[^\0\n]{1,4096}", "a path")
        self.check("settings")
        check_whole("settings", "rounds_per_hour", self.rounds_per_hour, 1, 2**31)

    @classmethod
    def load(cls, path: str | Path) -> ShufflerSettings:
        """The settings in a TOML file, their paths taken from its own folder; BadInput names the
        field that cannot be used.
        """
        return beside(
            path,
            cls.of(read_toml("settings", path)),
            ("seal_key", "sign_key", "store", "log", "socket"),
        )

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> ShufflerSettings:
        """The settings in a table with every field and no other."""
        return of_table("settings", cls, table)
