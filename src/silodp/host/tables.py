"""Settings files: a TOML table whose every field is checked, and what is wrong with it said in a sentence that begins with the file's kind."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput


def read_toml(kind: str, path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{kind} {str(path)!r} cannot be read ({type(error).__name__}); give the path of a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{kind} {str(path)!r} is not TOML: {error}") from None


def check_text(kind: str, name: str, value: object, pattern: str, wanted: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise BadInput(f"{kind}: {name} is {value!r:.100}; it must be {wanted}")


def check_texts(kind: str, name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise BadInput(f"{kind}: {name} is {value!r}; it must be a list of texts")


def check_whole(kind: str, name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise BadInput(f"{kind}: {name} is {value!r}; it must be an integer from {least} to {most}")
