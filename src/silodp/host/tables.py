"""Settings files: a TOML table whose every field is checked, and what is wrong with it said in a
sentence that begins with the file's kind.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from silodp.core.errors import BadInput, require
from silodp.core.text import is_line

T = TypeVar("T")
KEY = "Ed25519 public keys of 64 lower-case hexadecimal digits"


def read_toml(kind: str, path: str | Path) -> dict[str, Any]:
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
    """The dataclass that the table fills, lists as tuples, if it has every field without a default
    and no other.
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
                f"{kind}: the field {name!r} is missing; every field must be there, since "
                "no limit is guessed"
            )
    return cls(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in table.items()
        }
    )


def beside(path: str | Path, settings: T, names: Iterable[str]) -> T:
    """The settings with these paths, where they have one, taken from the folder that the settings'
    own file is in.
    """
    folder = Path(path).resolve().parent
    return replace(
        settings,  # type: ignore[type-var]
        **{name: str(folder / own) for name in names if (own := getattr(settings, name))},
    )


# --- checks of one field -------------------------------------------------------------------------


def check_text(kind: str, name: str, value: object, pattern: str, wanted: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise BadInput(f"{kind}: {name} is {value!r:.100}; it must be {wanted}")


def check_line(kind: str, name: str, value: object, wanted: str) -> None:
    """Raise BadInput unless the value is a text of one line in which every character shows."""
    if not is_line(value):
        raise BadInput(f"{kind}: {name} is {value!r:.100}; it must be {wanted}, without controls")


def check_texts(kind: str, name: str, value: object) -> None:
    require(
        isinstance(value, tuple) and all(isinstance(item, str) for item in value),
        f"{kind}: {name}",
        value,
        "a list of texts",
    )


def check_keys(kind: str, name: str, value: object, least: int = 1) -> None:
    if not isinstance(value, tuple) or len(value) < least:
        raise BadInput(
            f"{kind}: {name} is {value!r:.100}; it must be a list of at least {least}: {KEY}"
        )
    for key in value:
        check_text(kind, name, key, r"[0-9a-f]{64}", KEY)


def check_whole(kind: str, name: str, value: object, least: int, most: int) -> None:
    require(
        type(value) is int and least <= value <= most,
        f"{kind}: {name}",
        value,
        f"an integer from {least} to {most}",
    )


def check_number(
    kind: str, name: str, value: object, *, above: float, below: float = 1e300
) -> None:
    inside = type(value) in (int, float) and above < value < below  # type: ignore[operator]
    require(inside, f"{kind}: {name}", value, f"a number above {above:g} and below {below:g}")


# --- writing a table -----------------------------------------------------------------------------


def table_text(table: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Each field after its comment, in the comments' order."""
    return (
        "\n".join(
            f"\n# {comment}\n{name} = {toml(table[name])}"
            for name, comment in comments.items()
            if name in table
        )
        + "\n"
    )


def toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date):
        return value.isoformat()
    return repr(value)
