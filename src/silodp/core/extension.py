"""How code of a user's own is named: FILE.py:NAME, and FILE.py:NAME:0.1:2 where NAME is called with
numbers. Text alone; nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silodp.core.errors import BadInput

MODULE = "silodp_extension_"
"""A module made of such a file is named by this and the SHA-256 of its bytes: so what it defines is
named by its source in any process.
"""


def is_file(text: str) -> bool:
    """Whether `text` is FILE.py:NAME, and not a name of something that ships."""
    return ".py:" in text


def parse(text: str) -> tuple[str, str, tuple[str, ...]]:
    """FILE, NAME and the parameters of FILE.py:NAME:0.1:2."""
    file, _, rest = text.partition(".py:")
    name, *parameters = rest.split(":")
    return f"{file}.py", name, tuple(parameters)


def made(text: str, load: Callable[[str], Any], *arguments: Any) -> Any:
    """What FILE.py:NAME names; a class, or whatever has parameters or is given arguments, is called
    with those and the numbers.
    """
    found, (_, name, parameters) = load(text), parse(text)
    if not (isinstance(found, type) or parameters or arguments):
        return found
    try:
        numbers = [int(p) if p.lstrip("+-").isdigit() else float(p) for p in parameters]
        return found(*arguments, *numbers)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"{text} cannot be run: {name} cannot be called so ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); mend it"
        ) from None


def source(thing: object) -> str:
    """The module that defines `thing` or its class if that is such a file, and "" otherwise."""
    module = getattr(thing, "__module__", "") or ""
    return module if module.startswith(MODULE) else ""


def approved(text: str, thing: Any) -> Any:
    """What comes from a file is known by that file's hash, or is one that ships: what a third file
    holds, nobody has approved.
    """
    module = getattr(getattr(thing, "func", thing), "__module__", "") or ""
    if not source(getattr(thing, "func", thing)) and module.partition(".")[0] not in (
        "silodp",
        "torch",
    ):
        raise BadInput(
            f"{text} is defined in {module or 'no module'}, whose source nobody has "
            "approved; define it in the file itself"
        )
    return thing
