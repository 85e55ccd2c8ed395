"""The questions of `silodp init`: one at a time, each answer checked, until the schema is complete.
Only the header's names are read from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from silodp.cli.console import say
from silodp.core.errors import BadInput
from silodp.core.problem.person import MOST
from silodp.core.problem.schema import TYPES, Schema
from silodp.core.problem.task import KINDS
from silodp.core.text import visible

T = TypeVar("T")
FIRST = (
    "Answer from public knowledge: what a column can contain, not what it does contain.",
    "An empty answer takes the value in [brackets]. Ctrl-C ends without writing any file.",
)


def asked(question: str, accept: Callable[[str], T], default: str | None = None) -> T:
    """Ask until the answer is accepted, and return it. `accept` raises a ValueError that describes
    a valid answer. Raise BadInput at the end of the input.
    """
    while True:
        try:
            choice = ""
            if default is not None:
                choice = f" [{default}]"
            text = input(visible(f"{question}{choice}: ")).strip()
        except EOFError:
            raise BadInput(
                "the input ended before the last question; answer all questions, or "
                "use --yes for a draft to fill in"
            ) from None
        try:
            return accept(text or default or "")
        except ValueError as error:
            say(f"  {error}")


def ask_schema(names: Sequence[str], types: Mapping[str, str], label: str | None) -> dict[str, Any]:
    """Ask for a schema of these columns, or of columns named now if there are none. Return its
    table, which Schema accepts.
    """
    say(*FIRST)
    columns = list(names) or asked("Columns of every silo's file, separated by commas", _list(1))
    label = label or asked("The column to predict", _one_of(columns))
    ignored = []
    table = {}
    person = dict[str, Any]()
    task = asked(f"What is {label}: {', '.join(KINDS)}", _one_of(KINDS), "binary")
    predicted = {"task": task, **_label(task, label, columns)}
    for name in (name for name in columns if name not in predicted.values() and name != label):
        kinds = (*TYPES, "person", "ignore")
        if person:
            kinds = (*TYPES, "ignore")
        kind = types.get(name) or asked(
            f"{name}: {', '.join(kinds[:-1])} or ignore", _one_of(kinds)
        )
        if kind == "ignore":
            ignored.append(name)
        elif kind == "person":
            rows = asked(f"{name}: the most rows used of one person", _whole, "8")
            person |= {"person": name, "rows_per_person": rows, "combine": "mean"}
        else:
            table[name] = {"type": kind, **_column(name, kind)}
    codes = asked(
        "Codes for a missing value in any file, separated by commas, such as ?,-9", _list(0), ""
    )
    schema = {"ignore": ignored} | person
    if codes:
        schema["missing_codes"] = codes
    schema |= {"columns": table, "label": predicted}
    Schema.of(schema, "the answers")
    return schema


def ask_silos() -> list[str]:
    """Ask for the silos' files, for trials on one machine. Return absolute paths, or none."""

    def accept(text: str) -> list[str]:
        paths = [Path(word).expanduser() for word in _list(0)(text)]
        if lacking := [path for path in paths if not path.exists()]:
            raise ValueError(
                f"{lacking[0]} does not exist; give existing files, or an empty answer to "
                "add them later."
            )
        return [str(path.resolve()) for path in paths]

    return asked(
        "Silos' files on this machine, separated by commas (empty: each stays at its silo)",
        accept,
        "",
    )


# --- questions -----------------------------------------------------------------------------------


def _column(name: str, kind: str) -> dict[str, Any]:
    if kind == "category":
        given = asked(
            f"{name}: its categories, separated by commas ('other' is for all other values)",
            _list(1),
        )
        missing = asked(
            f"{name}: a missing value becomes its own category (own), or is refused (refuse)",
            _one_of(("own", "refuse")),
            "own",
        )
        return {"categories": given, "missing": missing}
    if kind == "boolean":
        missing = asked(
            f"{name}: a missing value becomes true, false or is refused",
            _one_of(("true", "false", "refuse")),
            "refuse",
        )
        values = {"true": True, "false": False, "refuse": "refuse"}
        return {"missing": values[missing]}
    low, high = _range(name)

    def fill(text: str) -> float | str:
        if text == "refuse":
            return text
        if not low <= (value := _number(text)) <= high:
            raise ValueError(f"Give a number from {low:g} to {high:g}, or refuse.")
        return value

    missing = asked(
        f"{name}: a missing value becomes a public number, or is refused",
        fill,
        f"{(low + high) / 2:g}",
    )
    return {"range": [low, high], "missing": missing}


def _label(task: str, label: str, columns: Sequence[str]) -> dict[str, Any]:
    if task == "survival":
        event = asked(
            f"{label} is the time. The column of the event (whether it happened)",
            _one_of([c for c in columns if c != label]),
        )
        return {
            "time": label,
            "event": event,
            "edges": asked("Ends of the time bins, separated by commas, such as 6,12,24", _edges),
        }
    if task == "regression":
        return {"column": label, "range": _range(label)}
    if task == "count":
        return {
            "column": label,
            "most": int(asked(f"{label}: the largest possible count", _number)),
        }
    words = {
        "binary": "its two classes, separated by commas, the one to detect last",
        "ordinal": "its classes, separated by commas, in order",
    }
    sizes: dict[str, tuple[int, int | None]] = {"ordinal": (3, None), "binary": (2, 2)}
    accepted = _list(*sizes.get(task, (2, None)))
    return {
        "column": label,
        "classes": asked(
            f"{label}: {words.get(task, 'its classes, separated by commas')}", accepted
        ),
    }


def _range(name: str) -> list[float]:
    def lowest(text: str) -> list[float]:
        """Read one number, or lowest and highest in one answer: 0,110 or 0 to 110."""
        found = [_number(part) for part in re.split(r"\s*(?:,|;|\bto\b|\.\.)\s*|\s+", text.strip())]
        if len(found) > 2 or (len(found) == 2 and found[0] >= found[1]):
            raise ValueError("Give the lowest value, or lowest and highest, such as 0,110.")
        return found

    low, *rest = asked(f"{name}: the lowest possible value", lowest)
    if rest:
        return [low, *rest]

    def above(text: str) -> float:
        if (value := _number(text)) <= low:
            raise ValueError(f"Give a number above {low:g}.")
        return value

    return [low, asked(f"{name}: the highest possible value", above)]


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ValueError(f"Give a whole number from 1 to {MOST}, from public knowledge.")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("Give a number, such as 110 or 0.5.") from None
    if not abs(value) < 1e300:
        raise ValueError("Give a finite number.")
    if value == int(value):
        return int(value)
    return value


def _edges(text: str) -> list[float]:
    found = [_number(word) for word in _list(1)(text)]
    if any(a >= b for a, b in zip([0, *found], found, strict=False)):
        raise ValueError("Give increasing numbers above 0, such as 6,12,24.")
    return found


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def accept(text: str) -> str:
        if text not in known:
            raise ValueError(f"Give one of {', '.join(known)}.")
        return text

    return accept


def _list(least: int, most: int | None = None) -> Callable[[str], list[str]]:
    wanted = "different words"
    if least == most:
        wanted = f"{least} different words"
    elif least:
        wanted = f"{least} or more different words"

    def accept(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",") if word.strip()]
        if len(found) < least or len(set(found)) != len(found) or (most and len(found) > most):
            raise ValueError(f"Give {wanted}, separated by commas.")
        return found

    return accept
