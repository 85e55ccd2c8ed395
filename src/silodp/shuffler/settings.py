"""A shuffler's settings, one TOML file: who may ask, who is a member, where it listens. Members are pseudonyms; no silo has a name here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.host.listening import check_site
from silodp.host.tables import check_text, check_whole, read_toml

KEY = "Ed25519 public keys of 64 lower-case hexadecimal digits"


@dataclass(frozen=True)
class Settings:
    """Made by `load` or `of`, which say in a sentence what is wrong with a file."""

    askers: tuple[str, ...]
    roster: tuple[str, ...]
    largest: int
    rounds_per_hour: int
    seal_key: str
    sign_key: str
    store: str
    log: str
    log_bytes: int
    socket: str
    socket_mode: str
    socket_group: str
    couriers: tuple[str, ...]
    connections: int
    timeout: float
    maximum_frame: int

    def __post_init__(self) -> None:
        for name, least in (("askers", 1), ("roster", 2)):
            keys = getattr(self, name)
            if not isinstance(keys, tuple) or len(keys) < least:
                raise BadInput(f"settings: {name} is {keys!r:.100}; it must be a list of at least {least}: {KEY}")
            for key in keys:
                check_text("settings", name, key, r"[0-9a-f]{64}", KEY)
            if len(set(keys)) < len(keys):
                raise BadInput(f"settings: {name} names a key twice; each must be another's")
        for name in ("seal_key", "sign_key", "store", "log", "socket"):
            check_text("settings", name, getattr(self, name), r"[^\0\n]{1,4096}", "a path")
        check_site("settings", self)
        check_whole("settings", "largest", self.largest, 1, 2**40)
        check_whole("settings", "rounds_per_hour", self.rounds_per_hour, 1, 2**31)
        if type(self.timeout) not in (int, float) or not 0 < self.timeout <= 3600:
            raise BadInput(f"settings: timeout is {self.timeout!r}; it must be a number of seconds above 0, at most 3600")

    @classmethod
    def load(cls, path: str | Path) -> Settings:
        """The settings in a TOML file, their paths taken from its own folder; BadInput names the field that cannot be used."""
        settings = cls.of(read_toml("settings", path))
        folder = Path(path).resolve().parent
        return replace(
            settings, **{name: str(folder / getattr(settings, name)) for name in ("seal_key", "sign_key", "store", "log", "socket")}
        )

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Settings:
        """The settings in a table with every field and no other."""
        names = [field.name for field in fields(cls)]
        if wrong := [*(name for name in table if name not in names), *(name for name in names if name not in table)]:
            raise BadInput(f"settings: the field {wrong[0]!r} is unknown or missing; the fields are {', '.join(names)}")
        found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
        return cls(**found)
