"""Parse the names of a user's own code: FILE.py:NAME, and FILE.py:NAME:0.1:2.

In the second form NAME is called with numbers. This module works on text. It reads no file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from silodp.core.errors import BadInput

CODE = ("model", "loss", "prox", "feature_map")
"""The fields of a policy, a study or a card that may be FILE.py:NAME."""
MODULE = "silodp_extension_"
"""The start of the name of a module made from a user's file. The SHA-256 of its bytes follows.

So the name of anything that it defines contains its source, in every process.
"""


def is_file(text: str) -> bool:
    """Return whether `text` is FILE.py:NAME, and not the name of something that ships."""
    return ".py:" in text


def parse(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Return FILE, NAME and the parameters of FILE.py:NAME:0.1:2."""
    file, _, rest = text.partition(".py:")
    name, *parameters = rest.split(":")
    return f"{file}.py", name, tuple(parameters)


def instantiate(text: str, load: Callable[[str], Any], *arguments: Any) -> Any:
    """Return what FILE.py:NAME names.

    A class is called with the arguments and the numbers. So is anything else that has parameters or
    is given arguments. Raise BadInput if the call fails.
    """
    thing = load(text)
    _, name, parameters = parse(text)
    if not (isinstance(thing, type) or parameters or arguments):
        return thing
    try:
        return thing(*arguments, *map(_number, parameters))
    except BadInput:
        raise
    except Exception as error:
        why = " ".join(str(error).split())
        raise BadInput(
            f"{text} cannot be run: the call of {name} fails ({type(error).__name__}: {why}); "
            "correct the function or its parameters"
        ) from None


def _number(text: str) -> int | float:
    """Return the number that a parameter spells. Raise ValueError if it spells none."""
    if text.lstrip("+-").isdigit():
        return int(text)
    return float(text)


def source(thing: object) -> str:
    """Return the module that defines `thing` or its class, if it is a user's file, otherwise ""."""
    module = getattr(thing, "__module__", "") or ""
    if module.startswith(MODULE):
        return module
    return ""


def approved(text: str, thing: Any) -> Any:
    """Return `thing`. Raise BadInput if it is defined in a third file.

    A definition names a user's file by its hash. Something that ships belongs to the library.
    No officer has approved the source of a third file.
    """
    function = getattr(thing, "func", thing)  # a functools.partial is known by its function
    module = getattr(function, "__module__", "") or ""
    ships = module.partition(".")[0] in ("silodp", "torch")
    if not source(function) and not ships:
        raise BadInput(
            f"{text} is defined in {module or 'no module'}, whose source no officer "
            "has approved; define it in the file itself"
        )
    return thing
