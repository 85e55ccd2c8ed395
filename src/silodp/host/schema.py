"""Reads a public schema from its file."""

from __future__ import annotations

import tomllib
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema


def load_schema(path: str | Path) -> Schema:
    """The schema in a TOML file; BadInput says in a sentence what is wrong with it."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the schema {path} cannot be read ({type(error).__name__}); `silodp init` drafts one") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the schema {path} is not TOML: {error}") from None
    return Schema.of(table, f"the schema {path}")
