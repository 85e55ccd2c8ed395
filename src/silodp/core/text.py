"""Show and check texts that came from outside, such as names in studies, cards and archives.

A terminal obeys control characters, and both terminals and browsers obey characters that reorder
or hide text. `visible` writes each of them as an escape. `is_name` refuses them where a file is
read.
"""

from __future__ import annotations

import re
import unicodedata

from silodp.core.errors import BadInput

LONGEST = 200
"""The most characters of a name."""
SHOWN = 4000
"""The most characters of a text that are shown."""
STUDY = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The pattern of a study's name, which also names a file."""
MARKS = 4
"""The most marks on one letter. No script needs more, and more cover the lines around."""
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters, marks and symbols that show nothing."""
_PLAIN = re.compile(r"[ -~]*")


def visible(text: object, most: int = SHOWN) -> str:
    """Return the text on one line, with an escape for each character that is obeyed or not shown.

    These are controls (C0, DEL, C1), characters that order text from right to left, characters
    without width, separators of lines, lone surrogates, characters that Unicode does not define,
    and marks that are piled up on one letter. After `most` characters only the number of the
    others is shown.
    """
    shown = str(text)
    cut = len(shown) - most
    if cut > 0:
        shown = shown[:most]
    if not _PLAIN.fullmatch(shown):
        shown = _all_escaped(shown)
    if cut > 0:
        return f"{shown} ... and {cut} more characters"
    return shown


def visible_lines(text: str) -> str:
    """Return a text of several lines, or a table with tabs, each line as `visible` shows it."""
    if _PLAIN.fullmatch(text):
        return text
    return _all_escaped(text, "\n\t")


def is_name(text: object, most: int = LONGEST) -> bool:
    """Return whether the text is a name.

    A name has 1 to `most` visible characters of any script. It has single spaces, and none at
    either end.
    """
    return (
        isinstance(text, str)
        and 0 < len(text) <= most
        and all(c == " " or (not _hidden(c) and not c.isspace()) for c in text)
        and _all_escaped(text) == text
        and text == text.strip(" ")
        and "  " not in text
    )


def check_name(what: str, value: object, most: int = LONGEST) -> None:
    """Raise BadInput unless the value is a name; `what` names the field."""
    if not is_name(value, most):
        shown = visible(repr(value), 100)
        raise BadInput(
            f"{what} is {shown}; it must be 1 to {most} visible characters with single spaces "
            "between words"
        )


def is_line(text: object, most: int = SHOWN) -> bool:
    """Return whether `visible` shows the text as it is."""
    return isinstance(text, str) and len(text) <= most and visible(text) == text


def _hidden(character: str) -> bool:
    """Return whether a screen obeys the character or shows nothing for it."""
    category = unicodedata.category(character)
    return category[0] == "C" or category in ("Zl", "Zp") or bool(_INVISIBLE.match(character))


def _all_escaped(text: str, but: str = "") -> str:
    """Return the text with its hidden characters escaped, except those in `but`, and with the marks
    escaped that follow `MARKS` others.
    """
    shown = []
    marks = 0
    for character in text:
        if unicodedata.category(character)[0] == "M":
            marks += 1
        else:
            marks = 0
        if character not in but and (_hidden(character) or marks > MARKS):
            shown.append(_escape(character))
        else:
            shown.append(character)
    return "".join(shown)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
