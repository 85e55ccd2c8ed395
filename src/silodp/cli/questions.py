"""What `silodp init` asks: one question at a time, each answer checked, until the schema is whole.
Nothing but the header's names is read off a file.
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
    "Answer from public knowledge: what a column can hold, not what it does hold.",
    "An empty answer takes what is in [brackets]; Ctrl-C leaves, and nothing is written.",
)


def asked(question: str, accept: Callable[[str], T], default: str | None = None) -> T:
    """The answer, asked for again until it is accepted; `accept` says in a ValueError what would
    do.
    """
    while True:
        try:
            choice = "" if default is None else f" [{default}]"
            text = input(visible(f"{question}{choice}: ")).strip()
        except EOFError:
            raise BadInput(
                "the answers ended before the questions did; answer them all, or use --yes "
                "for a draft to fill in"
            ) from None
        try:
            return accept(text or default or "")
        except ValueError as error:
            say(f"  {error}")


def ask_schema(names: Sequence[str], types: Mapping[str, str], label: str | None) -> dict[str, Any]:
    """A schema's table, about these columns of a file or, where there are none, about those that
    are named now; it is one that Schema takes.
    """
    say(*FIRST)
    columns = list(names) or asked("Columns that every silo's file has, by commas", _list(1))
    label = label or asked("The column to predict", _one_of(columns))
    ignored = []
    table = {}
    person = dict[str, Any]()
    task = asked(f"What is {label}: {', '.join(KINDS)}", _one_of(KINDS), "binary")
    predicted = {"task": task, **_label(task, label, columns)}
    for name in (name for name in columns if name not in predicted.values() and name != label):
        kinds = (*TYPES, *(["person"] if not person else []), "ignore")
        kind = types.get(name) or asked(
            f"{name}: {', '.join(kinds[:-1])} or ignore", _one_of(kinds)
        )
        if kind == "ignore":
            ignored.append(name)
        elif kind == "person":
            rows = asked(f"{name}: rows of a person that are used, at most", _whole, "8")
            person |= {"person": name, "rows_per_person": rows, "combine": "mean"}
        else:
            table[name] = {"type": kind, **_column(name, kind)}
    codes = asked("Codes for a missing value in any file, by commas, such as ?,-9", _list(0), "")
    made = (
        {"ignore": ignored}
        | person
        | ({"missing_codes": codes} if codes else {})
        | {"columns": table, "label": predicted}
    )
    Schema.of(made, "what was answered")
    return made


def ask_silos() -> list[str]:
    """The silos' files, absolute, for trying things on one machine; none for later."""

    def accept(text: str) -> list[str]:
        paths = [Path(word).expanduser() for word in _list(0)(text)]
        if lacking := [path for path in paths if not path.exists()]:
            raise ValueError(f"{lacking[0]} does not exist; give files, or nothing for later.")
        return [str(path.resolve()) for path in paths]

    return asked(
        "Silos' files on this machine, by commas (none: each stays at its silo)", accept, ""
    )


# --- questions -----------------------------------------------------------------------------------


def _column(name: str, kind: str) -> dict[str, Any]:
    if kind == "category":
        given = asked(f"{name}: its categories, by commas ('other' takes the rest)", _list(1))
        missing = asked(
            f"{name}: a missing value is its own category, or refused (own, refuse)",
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
        return {"missing": missing if missing == "refuse" else missing == "true"}
    low, high = _range(name)

    def fill(text: str) -> float | str:
        if text == "refuse":
            return text
        if not low <= (value := _number(text)) <= high:
            raise ValueError(f"It must be from {low:g} to {high:g}, or refuse.")
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
            f"{label} is the time; the column that says whether the event came",
            _one_of([c for c in columns if c != label]),
        )
        return {
            "time": label,
            "event": event,
            "edges": asked("Ends of the time bins, by commas, such as 6,12,24", _edges),
        }
    if task == "regression":
        return {"column": label, "range": _range(label)}
    if task == "count":
        return {
            "column": label,
            "most": int(asked(f"{label}: the largest count that there can be", _number)),
        }
    words = {
        "binary": "its two classes, by commas, the one to find last",
        "ordinal": "its classes, by commas, in order",
    }
    accepted = _list(3 if task == "ordinal" else 2, 2 if task == "binary" else None)
    return {
        "column": label,
        "classes": asked(f"{label}: {words.get(task, 'its classes, by commas')}", accepted),
    }


def _range(name: str) -> list[float]:
    def lowest(text: str) -> list[float]:
        """One number, or both at once, as people answer: 0,110 or 0 to 110."""
        found = [_number(part) for part in re.split(r"\s*(?:,|;|\bto\b|\.\.)\s*|\s+", text.strip())]
        if len(found) > 2 or (len(found) == 2 and found[0] >= found[1]):
            raise ValueError("Give the lowest value, or lowest and highest, such as 0,110.")
        return found

    low, *rest = asked(f"{name}: the lowest value that it can have", lowest)
    if rest:
        return [low, *rest]

    def above(text: str) -> float:
        if (value := _number(text)) <= low:
            raise ValueError(f"It must be above {low:g}.")
        return value

    return [low, asked(f"{name}: the highest", above)]


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
    return int(value) if value == int(value) else value


def _edges(text: str) -> list[float]:
    found = [_number(word) for word in _list(1)(text)]
    if any(a >= b for a, b in zip([0, *found], found, strict=False)):
        raise ValueError("Give rising numbers above 0, such as 6,12,24.")
    return found


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def accept(text: str) -> str:
        if text not in known:
            raise ValueError(f"Give one of {', '.join(known)}.")
        return text

    return accept


def _list(least: int, most: int | None = None) -> Callable[[str], list[str]]:
    def accept(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",") if word.strip()]
        if len(found) < least or len(set(found)) != len(found) or (most and len(found) > most):
            raise ValueError(
                "Give "
                f"{f'{least} ' if least == most else f'{least} or more ' if least else ''}different "  # noqa: E501
                ""
                ""
                ""
                ""
                ""
                ""
                ""
                ""
                ""
                "words, parted by commas."
            )
        return found

    return accept
