"""What a resumed run must share with the run that it goes on with: the same noise under another
function shows where the two differ.

The definition of a problem has a model's shapes and constants, but not what its `forward` does; so
a model's own file counts by its bytes. What that file brings in from elsewhere must be known too:
the standard library, and the packages whose versions are kept. A file that takes more than those is
trained as any other, but is not resumed. Not seen is what a file reads by other means than imports
and `open`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.extension import is_file, parse
from silodp.engine import native
from silodp.host.extension import load, named, run

PACKAGES = ("silodp", "torch", "numpy", "scipy", "dp-accounting")
IMPORTED = (sys.stdlib_module_names - {"importlib", "imp", "pkgutil", "runpy", "zipimport"}) | {
    "silodp",
    "torch",
    "numpy",
    "scipy",
}
BUILTINS = ("__import__", "compile", "eval", "exec", "open")
"""What could bring in code or numbers that no import names."""


class Code:
    """Loads FILE.py:NAME from the bytes that the file has now, and remembers what it ran: another
    file under the same noise is another run.
    """

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}

    def load(self, text: str) -> Any:
        if not is_file(text):
            return load(text)
        path = parse(text)[0]
        try:
            found = Path(path).read_bytes()
        except OSError as error:
            raise BadInput(
                f"the file {path} cannot be read ({type(error).__name__}); give FILE.py:NAME"
            ) from None
        self.sha256[str(Path(path).resolve())] = hashlib.sha256(found).hexdigest()
        return named(run(found, path), text)

    def of(self, **words: str) -> dict[str, str]:
        """The SHA-256 of each word that is FILE.py:NAME, as it was loaded."""
        return {
            f"{what}_sha256": self.sha256[str(Path(parse(text)[0]).resolve())]
            for what, text in words.items()
            if is_file(text)
        }


def refuse_imports(*words: str) -> None:
    """BadInput if a file of the user's own uses what could have changed unseen since its run was
    begun.
    """
    for path in dict.fromkeys(parse(text)[0] for text in words if is_file(text)):
        if used := sorted(_unknown(ast.parse(Path(path).read_bytes()))):
            raise BadInput(
                f"the file {path} uses {', '.join(used)}, of which nobody can tell whether "
                "it is as it was, so its run is not resumed; "
                "start another with --new, or keep to the standard library, torch, numpy and scipy"
            )


def _unknown(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.add(node.id)
    return {name for name in found if not (name in IMPORTED and _installed(name))}


def _installed(name: str) -> bool:
    """Whether the import finds the one that was installed, and not a file of the same name in the
    current folder.
    """
    spec = importlib.util.find_spec(name)
    if name == "silodp" or (spec and spec.origin in ("built-in", "frozen")):
        return True
    places = [
        Path(sysconfig.get_path(kind)).resolve()
        for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    return bool(
        spec
        and spec.origin
        and any(Path(spec.origin).resolve().is_relative_to(place) for place in places)
    )


def pinned(code: Mapping[str, str], start: Tensor, mechanisms: Mapping[str, Any]) -> dict[str, Any]:
    """For run.json: the function, where it starts, the noise to the last bit, and by what it is
    computed; all of it is public.
    """
    return {
        **code,
        "start": hashlib.sha256(start.contiguous().numpy().tobytes()).hexdigest(),
        "noise": {
            kind: [number.hex() for name in m.noise for number in _numbers(getattr(m, name))]
            for kind, m in mechanisms.items()
        },
        **{name: torch.__version__ if name == "torch" else version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "native": native.library() is not None,
    }


def _numbers(value: Any) -> list[float]:
    return torch.as_tensor(value, dtype=torch.float64).flatten().tolist()
