"""Load a user's own code, FILE.py:NAME, by its path.

Only the person who starts a program names such a file, on that program's own machine. No file and
no name in it is ever taken from a message.
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
    """Return what FILE.py defines as NAME, or the constants of a feature map that ships.

    The file is run once in a process, under a module name of its own. Raise BadInput with the
    reason if that fails.
    """
    if not is_file(text):
        from silodp.host.shipped import constants  # needs torch

        return constants(text)
    return named(_module(str(Path(parse(text)[0]).resolve())), text)


def named(module: ModuleType, text: str) -> Any:
    """Return what the module defines as NAME. Raise BadInput if it does not define it."""
    path, name, _ = parse(text)
    if not name or not hasattr(module, name):
        raise BadInput(
            f"{path} has no {name!r}; give FILE.py:NAME with a name that the file defines"
        )
    return getattr(module, name)


def ran(text: str) -> str:
    """Return the SHA-256 of FILE.py as this process ran it.

    It does not depend on what the file's functions state about their origin.
    """
    return _module(str(Path(parse(text)[0]).resolve())).__name__.removeprefix(MODULE)


def file_hash(text: str) -> str:
    """Return the SHA-256 of the file in FILE.py:NAME, or "" for a name that ships with silodp.

    A definition contains a model's shapes, but not what its `forward` does.
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
    """Return the module that these bytes define, whatever the file contains by now.

    Raise BadInput if the code raises an error.
    """
    return run_again(source, path)


@cache
def _compiled(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec")


def run_again(source: bytes, path: str) -> ModuleType:
    """Return a new module from these bytes, without any state of an earlier one.

    Raise BadInput if the code raises an error.
    """
    name = MODULE + hashlib.sha256(source).hexdigest()
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        exec(_compiled(source, path), vars(module))
    except (Exception, SystemExit) as error:  # a call of sys.exit in the file is an error too
        del sys.modules[name]
        raise BadInput(
            f"{path} cannot be run ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); fix that file"
        ) from None
    return module
