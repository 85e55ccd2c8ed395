"""Code of the user's own: FILE.py:NAME, loaded by its path in whatever process needs it.

Only who starts a program names such a file, on that program's own machine; no file, and no name of
one, is taken from a message.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from silodp.core.errors import BadInput
from silodp.core.extension import MODULE, is_file, parse


def load(text: str) -> Any:
    """What FILE.py calls NAME, or the constants of a map of features that ships.

    The file is run once in a process, under a name of its own; BadInput says in a sentence what is
    wrong.
    """
    if not is_file(text):
        from silodp.host.shipped import constants  # needs torch

        return constants(text)
    return named(_module(str(Path(parse(text)[0]).resolve())), text)


def named(module: ModuleType, text: str) -> Any:
    path, name, _ = parse(text)
    if not name or not hasattr(module, name):
        raise BadInput(
            f"{path} has no {name!r}; give FILE.py:NAME with a name that the file defines"
        )
    return getattr(module, name)


def ran(text: str) -> str:
    """SHA-256 of FILE.py as this process has run it, whatever its functions say of where they come
    from.
    """
    return _module(str(Path(parse(text)[0]).resolve())).__name__.removeprefix(MODULE)


def file_hash(text: str) -> str:
    """SHA-256 of the file in FILE.py:NAME, "" for a name of something that ships: a definition has
    a model's shapes, but not what its `forward` does.
    """
    path = Path(parse(text)[0])
    if is_file(text) and path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""


@cache
def _module(path: str) -> ModuleType:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(
            f"the file {path} cannot be read ({type(error).__name__}); give FILE.py:NAME"
        ) from None
    return run(source, path)


@cache
def run(source: bytes, path: str) -> ModuleType:
    """The module that these bytes make, whatever the file holds by now; BadInput if they raise."""
    return run_again(source, path)


@cache
def _compiled(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec")


def run_again(source: bytes, path: str) -> ModuleType:
    """As `run`, but a module of its own each time: nothing that an earlier one keeps is in it."""
    name = MODULE + hashlib.sha256(source).hexdigest()
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        exec(_compiled(source, path), vars(module))
    except (Exception, SystemExit) as error:  # a file that ends the program ends nothing
        del sys.modules[name]
        raise BadInput(
            f"{path} cannot be run ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); mend it"
        ) from None
    return module
