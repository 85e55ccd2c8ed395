"""Code of the user's own: FILE.py:NAME, loaded by its path in whatever process needs it.

Only who starts a program names such a file, on that program's own machine; no file, and no name of one, is taken from a message.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from silodp.core.errors import BadInput


def is_file(text: str) -> bool:
    """Whether `text` is FILE.py:NAME, and not a name of something that ships."""
    return ".py:" in text


def parse(text: str) -> tuple[Path, str, tuple[str, ...]]:
    """FILE, NAME and the parameters of FILE.py:NAME:0.1:2."""
    file, _, rest = text.partition(".py:")
    name, *parameters = rest.split(":")
    return Path(f"{file}.py"), name, tuple(parameters)


def load(text: str) -> Any:
    """What FILE.py calls NAME. The file is run once in a process, under a name of its own; BadInput says in a sentence what is wrong."""
    path, name, _ = parse(text)
    module = _module(path.resolve())
    if not name or not hasattr(module, name):
        raise BadInput(f"{path} has no {name!r}; give FILE.py:NAME with a name that the file defines")
    return getattr(module, name)


def file_hash(text: str) -> str:
    """SHA-256 of the file in FILE.py:NAME, "" for a name of something that ships."""
    path = parse(text)[0]
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_file(text) and path.is_file() else ""


@cache
def _module(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BadInput(f"the file {path} cannot be read ({type(error).__name__}); give FILE.py:NAME") from None
    return run(source, path)


def run(source: bytes, path: Path) -> ModuleType:
    """The module that these bytes make, whatever the file holds by now; BadInput if they raise."""
    name = f"silodp_extension_{path.stem}_{hashlib.sha256(source).hexdigest()[:16]}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except Exception as error:
        del sys.modules[name]
        raise BadInput(f"{path} cannot be run ({type(error).__name__}: {' '.join(str(error).split())}); mend it") from None
    return module
