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
BACK = "<"
FIRST = (
    "Answer from public knowledge: what a column can contain, not what it does contain.",
    "An empty answer takes the value in [brackets]. < goes back to the previous question. Ctrl-C "
    "ends without writing any file.",
)
NO_DATES = (
    "Dates are not supported. In each silo's file, replace the date by a number, such as the age "
    "in years or the days since admission, and answer number. Or answer ignore."
)
DATE_LIKE = re.compile(r"date|datum|birth|geburt|\bdob\b|_dt$|_at$|zeitpunkt", re.IGNORECASE)
"""Names of columns that often contain dates."""
FREQUENT = (
    "How frequent is {}: a public estimate from the literature, such as 12 % (empty: unknown)"
)


class _Back(Exception):
    """Go back one question."""


class Interview:
    """Ask one question after another. The user can go back to the previous one.

    `run` starts all questions again then, and gives the earlier answers itself.
    """

    def __init__(self) -> None:
        self._answers: list[str] = []
        self._next = 0

    def run(self, questions: Callable[[Interview], T]) -> T:
        """Return what `questions` makes of the answers."""
        while True:
            self._next = 0
            try:
                return questions(self)
            except _Back:
                self._answers.pop()

    def ask(self, question: str, accept: Callable[[str], T], default: str | None = None) -> T:
        """Ask until the answer is accepted, and return it. `accept` raises a ValueError that
        describes a valid answer. Raise BadInput at the end of the input.
        """
        if self._next < len(self._answers):
            text = self._answers[self._next]
            self._next += 1
            return accept(text)
        while True:
            text = _input(question, default)
            if text == BACK and self._answers:
                raise _Back
            if text == BACK:
                say("  This is the first question.")
                continue
            try:
                accepted = accept(text or default or "")
            except ValueError as error:
                say(f"  {error}")
                continue
            self._answers.append(text or default or "")
            self._next += 1
            return accepted


def _input(question: str, default: str | None) -> str:
    """Return one line of the user's. Raise BadInput at the end of the input."""
    choice = ""
    if default is not None:
        choice = f" [{default}]"
    try:
        return input(visible(f"{question}{choice}: ")).strip()
    except EOFError:
        raise BadInput(
            "the input ended before the last question; answer all questions, or "
            "use --yes for a draft to fill in"
        ) from None


def ask_project(
    names: Sequence[str], types: Mapping[str, str], label: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Ask for a schema of these columns, and for the silos' files. Return the schema's table, which
    Schema accepts, and absolute paths.
    """
    say(*FIRST)

    def questions(interview: Interview) -> tuple[dict[str, Any], list[str]]:
        return _ask_schema(interview, names, types, label), _ask_silos(interview)

    return Interview().run(questions)


def _ask_schema(
    interview: Interview, names: Sequence[str], types: Mapping[str, str], label: str | None
) -> dict[str, Any]:
    """Ask for a schema of these columns, or of columns named now if there are none."""
    columns = list(names) or interview.ask(
        "Columns of every silo's file, separated by commas", _list(1)
    )
    label = label or interview.ask("The column to predict", _one_of(columns))
    ignored = []
    table = {}
    person = dict[str, Any]()
    task = interview.ask(f"What is {label}: {', '.join(KINDS)}", _one_of(KINDS), "binary")
    predicted = {"task": task, **_label(interview, task, label, columns)}
    rest = False
    for name in (name for name in columns if name not in predicted.values() and name != label):
        kind = types.get(name)
        if not kind and rest:
            kind = "ignore"
        kind = kind or _ask_kind(interview, name, with_person=not person)
        if kind == "rest":
            rest = True
            kind = "ignore"
        if kind == "ignore":
            ignored.append(name)
        elif kind == "person":
            rows = interview.ask(f"{name}: the most rows used of one person", _whole, "8")
            person |= {"person": name, "rows_per_person": rows, "combine": "mean"}
        else:
            table[name] = {"type": kind, **_column(interview, name, kind)}
    if not table:
        say("  Every column is ignored. A model needs at least one column to learn from.")
        raise _Back
    codes = interview.ask(
        "Codes for a missing value in any file, separated by commas, such as ?,-9", _list(0), ""
    )
    schema = {"ignore": ignored} | person
    if codes:
        schema["missing_codes"] = codes
    schema |= {"columns": table, "label": predicted}
    Schema.of(schema, "the answers")
    return schema


def _ask_kind(interview: Interview, name: str, *, with_person: bool) -> str:
    """Ask what a column is. `rest` ignores it and all columns after it."""
    kinds: list[str] = list(TYPES)
    if with_person:
        kinds.append("person")
    kinds += ["ignore", "rest"]

    def accept(text: str) -> str:
        if text == "date":
            raise ValueError(NO_DATES)
        return _one_of(kinds)(text)

    hint = ""
    if DATE_LIKE.search(name):
        hint = " (a date is not supported; answer date for what to do)"
    question = f"{name}: {', '.join(kinds[:-1])}, or rest (ignore all that are left){hint}"
    return interview.ask(question, accept)


def _ask_silos(interview: Interview) -> list[str]:
    """Ask for the silos' files, for trials on one machine. Return absolute paths, or none."""

    def accept(text: str) -> list[str]:
        paths = [Path(word).expanduser() for word in _list(0)(text)]
        if lacking := [path for path in paths if not path.exists()]:
            raise ValueError(
                f"{lacking[0]} does not exist; give existing files, or an empty answer to "
                "add them later."
            )
        return [str(path.resolve()) for path in paths]

    return interview.ask(
        "Silos' files on this machine, separated by commas (empty: each stays at its silo)",
        accept,
        "",
    )


# --- questions -----------------------------------------------------------------------------------


def _column(interview: Interview, name: str, kind: str) -> dict[str, Any]:
    if kind == "category":
        categories, aliases = _ask_categories(interview, name)
        missing = interview.ask(
            f"{name}: a missing value becomes its own category (own), or is refused (refuse)",
            _one_of(("own", "refuse")),
            "own",
        )
        table: dict[str, Any] = {"categories": categories, "missing": missing}
        if aliases:
            table["aliases"] = aliases
        return table
    if kind == "boolean":
        missing = interview.ask(
            f"{name}: a missing value becomes true, false or is refused",
            _one_of(("true", "false", "refuse")),
            "refuse",
        )
        values = {"true": True, "false": False, "refuse": "refuse"}
        return {"missing": values[missing]}
    low, high = _range(interview, name)

    def fill(text: str) -> float | str:
        if text == "refuse":
            return text
        if not low <= (value := _number(text)) <= high:
            raise ValueError(f"Give a number from {low:g} to {high:g}, or refuse.")
        return value

    missing = interview.ask(
        f"{name}: a missing value becomes a typical value from public knowledge, or is refused",
        fill,
        f"{(low + high) / 2:g}",
    )
    return {"range": [low, high], "missing": missing}


def _label(interview: Interview, task: str, label: str, columns: Sequence[str]) -> dict[str, Any]:
    if task == "survival":
        event = interview.ask(
            f"{label} is the time. The column of the event (whether it happened)",
            _one_of([c for c in columns if c != label]),
        )
        return {
            "time": label,
            "event": event,
            "edges": interview.ask(
                "Ends of the time bins, separated by commas, such as 6,12,24", _edges
            ),
        }
    if task == "regression":
        return {"column": label, "range": _range(interview, label)}
    if task == "count":
        return {
            "column": label,
            "most": int(interview.ask(f"{label}: the largest possible count", _number)),
        }
    words = {
        "binary": "its two classes, separated by commas, the one to detect last",
        "ordinal": "its classes, separated by commas, in order",
    }
    sizes: dict[str, tuple[int, int | None]] = {"ordinal": (3, None), "binary": (2, 2)}
    accepted = _list(*sizes.get(task, (2, None)))
    question = f"{label}: {words.get(task, 'its classes, separated by commas')}"
    table: dict[str, Any] = {"column": label, "classes": interview.ask(question, accepted)}
    if task == "binary":
        positive = interview.ask(FREQUENT.format(repr(table["classes"][1])), _share, "")
        if positive:
            table["positive"] = positive
    return table


def _ask_categories(interview: Interview, name: str) -> tuple[list[str], dict[str, str]]:
    """Ask for the categories of a column, and their other spellings. Words that look alike, such as
    Female, female and F, become one category if the user agrees.
    """
    groups = interview.ask(
        f"{name}: its categories, separated by commas, with = between spellings of one, such as "
        "female=F=w, male=M ('other' is for all other values)",
        _spellings,
    )
    joined = _alike(groups)
    if len(joined) < len(groups):
        shown = "; ".join(" = ".join(group) for group in joined if group not in groups)
        answer = interview.ask(
            f"{name}: spellings of one category? {shown} (yes or no)", _one_of(("yes", "no")), "yes"
        )
        if answer == "yes":
            groups = joined
    return [group[0] for group in groups], {s: group[0] for group in groups for s in group[1:]}


def _spellings(text: str) -> list[list[str]]:
    """Read categories, each with its spellings: female=F=w, male=M."""
    groups = [[word.strip() for word in part.split("=")] for part in _list(1)(text)]
    words = [word for group in groups for word in group]
    if len(set(words)) != len(words) or not all(words):
        raise ValueError("Give different words, such as female=F, male=M.")
    return groups


def _alike(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Join the groups that differ in capital letters alone, and a single letter with the only group
    of which it is the first. The longest spelling in small letters names the category.
    """
    by_word: dict[str, list[str]] = {}
    for group in groups:
        by_word.setdefault(group[0].casefold(), []).extend(group)
    for letter in [word for word in by_word if len(word) == 1 and word.isalpha()]:
        longer = [word for word in by_word if len(word) > 1 and word.startswith(letter)]
        if len(longer) == 1:
            by_word[longer[0]] += by_word.pop(letter)
    return [
        sorted(words, key=lambda word: (-len(word), word != word.casefold()))
        if len(words) > 1 and words not in groups
        else words
        for words in by_word.values()
    ]


def _share(text: str) -> float | None:
    """Read a share above 0 and below 1, also in per cent. No text is None."""
    if not text:
        return None
    number = text.removesuffix("%").strip().replace(",", ".")
    wanted = "Give a share above 0 and below 1, such as 0.12 or 12 %, or an empty answer."
    try:
        value = float(number)
    except ValueError:
        raise ValueError(wanted) from None
    if text.endswith("%"):
        value = value / 100
    if not 0 < value < 1:
        raise ValueError(wanted)
    return round(value, 6)


def _range(interview: Interview, name: str) -> list[float]:
    def lowest(text: str) -> list[float]:
        """Read one number, or lowest and highest in one answer: 0,110 or 0 to 110."""
        found = [_number(part) for part in re.split(r"\s*(?:,|;|\bto\b|\.\.)\s*|\s+", text.strip())]
        if len(found) > 2 or (len(found) == 2 and found[0] >= found[1]):
            raise ValueError("Give the lowest value, or lowest and highest, such as 0,110.")
        return found

    low, *rest = interview.ask(f"{name}: the lowest possible value", lowest)
    if rest:
        return [low, *rest]

    def above(text: str) -> float:
        if (value := _number(text)) <= low:
            raise ValueError(f"Give a number above {low:g}.")
        return value

    return [low, interview.ask(f"{name}: the highest possible value", above)]


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
