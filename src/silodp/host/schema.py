"""Read a public schema from its file, and write one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Schema
from silodp.host.tables import toml

HEAD = """\
# The public schema: what every silo's file contains, and what is predicted. The server and all
# silos use this same file, and its hash is part of what a silo approves. Everything in it is public
# knowledge: the values that a column can have, not the values in a hospital's file.

"""


def load_schema(path: str | Path) -> Schema:
    """Return the schema in a TOML file. Raise BadInput with what is wrong with it."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"the schema {path} cannot be read ({type(error).__name__}); `silodp init` drafts one"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the schema {path} is not TOML: {error}") from None
    return Schema.of(table, f"the schema {path}")


def schema_text(table: Mapping[str, Any]) -> str:
    """Return the text of a file that `load_schema` reads."""
    tables = {f"columns.{toml(name)}": column for name, column in table.get("columns", {}).items()}
    tables |= {name: table[name] for name in ("images", "label") if name in table}
    lines = [
        HEAD,
        *(
            f"{name} = {toml(value)}\n"
            for name, value in table.items()
            if not isinstance(value, dict)
        ),
    ]
    for name, fields in tables.items():
        lines += [
            f"\n[{name}]\n",
            *(f"{field} = {toml(value)}\n" for field, value in fields.items()),
        ]
    return "".join(lines)
