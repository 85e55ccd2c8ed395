"""Check settings files: TOML tables in which every field is checked.

Each error is a sentence that begins with the file's kind.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from silodp.core.errors import BadInput, require
from silodp.core.text import is_line

T = TypeVar("T")
KEY = "Ed25519 public keys of 64 lower-case hexadecimal digits"


def read_toml(kind: str, path: str | Path) -> dict[str, Any]:
    """Return the table in a TOML file. Raise BadInput if it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{kind} {str(path)!r} cannot be read ({type(error).__name__}); give the path "
            "of a TOML file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{kind} {str(path)!r} is not TOML: {error}") from None


def of_table(kind: str, cls: type[T], table: Mapping[str, Any]) -> T:
    """Return the dataclass that the table fills, with lists as tuples.

    Raise BadInput if a field without a default is missing, or a field is unknown.
    """
    names = {field.name: field.default is MISSING for field in fields(cls)}  # type: ignore[arg-type]
    for name in table:
        if name not in names:
            raise BadInput(
                f"{kind}: the field {name!r} is unknown; the fields are {', '.join(names)}"
            )
    for name, required in names.items():
        if required and name not in table:
            raise BadInput(
                f"{kind}: the field {name!r} is missing; every field must be given, since no "
                "limit has a default"
            )
    values = dict(table)
    for name, value in table.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    return cls(**values)


def beside(path: str | Path, settings: T, names: Iterable[str]) -> T:
    """Return the settings with these paths taken from the folder of the settings' own file.

    Empty paths stay empty.
    """
    folder = Path(path).resolve().parent
    absolute = {}
    for name in names:
        relative = getattr(settings, name)
        if relative:
            absolute[name] = str(folder / relative)
    return replace(settings, **absolute)  # type: ignore[type-var]


# --- checks of one field -------------------------------------------------------------------------


def check_text(kind: str, name: str, value: object, pattern: str, wanted: str) -> None:
    """Raise BadInput unless the value is a text that matches the pattern completely."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise BadInput(f"{kind}: {name} is {value!r:.100}; it must be {wanted}")


def check_line(kind: str, name: str, value: object, wanted: str) -> None:
    """Raise BadInput unless the value is a text of one line in which every character shows."""
    if not is_line(value):
        raise BadInput(f"{kind}: {name} is {value!r:.100}; it must be {wanted}, without controls")


def check_texts(kind: str, name: str, value: object) -> None:
    """Raise BadInput unless the value is a tuple of texts."""
    require(
        isinstance(value, tuple) and all(isinstance(item, str) for item in value),
        f"{kind}: {name}",
        value,
        "a list of texts",
    )


def check_keys(kind: str, name: str, value: object, least: int = 1) -> None:
    """Raise BadInput unless the value is a tuple of at least `least` public keys."""
    if not isinstance(value, tuple) or len(value) < least:
        raise BadInput(
            f"{kind}: {name} is {value!r:.100}; it must be a list of at least {least}: {KEY}"
        )
    for key in value:
        check_text(kind, name, key, r"[0-9a-f]{64}", KEY)


def check_whole(kind: str, name: str, value: object, least: int, most: int) -> None:
    """Raise BadInput unless the value is an integer from `least` to `most`."""
    require(
        type(value) is int and least <= value <= most,
        f"{kind}: {name}",
        value,
        f"an integer from {least} to {most}",
    )


def check_number(
    kind: str, name: str, value: object, *, above: float, below: float = 1e300
) -> None:
    """Raise BadInput unless the value is a number between `above` and `below`, both excluded."""
    inside = type(value) in (int, float) and above < value < below  # type: ignore[operator]
    require(inside, f"{kind}: {name}", value, f"a number above {above:g} and below {below:g}")


# --- writing a table -----------------------------------------------------------------------------


def table_text(table: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return each field after its comment, in the order of the comments."""
    return (
        "\n".join(
            f"\n# {comment}\n{name} = {toml(table[name])}"
            for name, comment in comments.items()
            if name in table
        )
        + "\n"
    )


def toml(value: Any) -> str:
    """Return the value as TOML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml(name)} = {toml(item)}' for name, item in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date):
        return value.isoformat()
    return repr(value)


# --- the settings that every daemon has -----------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "log_bytes": 1_000_000,
    "socket_mode": "0660",
    "socket_group": "",
    "couriers": (),
    "connections": 32,
    "timeout": 30.0,
    "maximum_frame": 2**28,
}
"""Values for new settings. A daemon itself has no defaults for these."""
COMMENTS = {
    "log_bytes": "Size at which a new log is begun; five older ones are kept.",
    "socket": "The socket to which the courier connects. Paths are relative to this file's folder.",
    "socket_mode": "Its mode. Only owner and group can ever connect.",
    "socket_group": "Its group, which the courier's user belongs to; \"\" leaves the daemon's own.",
    "couriers": (
        "Users, by name or number, that may ask. An empty list means all that the mode allows."
    ),
    "connections": "Open connections, at most.",
    "timeout": "Seconds after which a silent or slow courier is disconnected.",
    "maximum_frame": "Bytes of a frame, at most.",
}


def for_unit(daemon: str) -> dict[str, Any]:
    """Return the settings that the systemd units of silodp-`daemon` and its courier expect."""
    return {
        "socket": f"/run/silodp-{daemon}/{daemon}.sock",
        "socket_group": "silodp-socket",
        "couriers": ("silodp-courier",),
    }


@dataclass(frozen=True)
class Site:
    """The socket and the log of a daemon, and the users that may connect."""

    log: str
    log_bytes: int
    socket: str
    socket_mode: str
    socket_group: str
    couriers: tuple[str, ...]
    connections: int
    timeout: float
    maximum_frame: int

    def check(self, kind: str) -> None:
        """Raise BadInput for a value that no daemon could use. `kind` names the settings' file in
        it.
        """
        for name in ("log", "socket"):
            check_text(kind, name, getattr(self, name), r"[^\0\n]{1,4096}", "a path")
        check_text(
            kind,
            "socket_group",
            self.socket_group,
            r"[^\0\n]{0,64}",
            'the name or number of a group, or ""',
        )
        wanted = 'octal with read and write for the owner and no rights for others, such as "0660"'
        check_text(kind, "socket_mode", self.socket_mode, r"06[0-7]0", wanted)
        check_texts(kind, "couriers", self.couriers)
        for name, least, most in (
            ("log_bytes", 1000, 2**40),
            ("connections", 1, 1024),
            ("maximum_frame", 1000, 2**32 - 1),
        ):
            check_whole(kind, name, getattr(self, name), least, most)
        check_number(kind, "timeout", self.timeout, above=0, below=3601)
