"""The facts that a resumed run must share with the interrupted run. The same noise under another
function would show where the two functions differ.

The definition of a problem has a model's shapes and constants, but not the code of its `forward`.
So a model's own file is identified by its bytes. The imports of that file must be identified too.
They may be the standard library, and the packages whose versions are recorded. A file with other
imports can be trained like any other, but its run is not resumed. This check does not see what a
file reads by other means than imports and `open`.
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
"""Names that can load code or numbers without an import."""


class Code:
    """Loads FILE.py:NAME from the present bytes of the file, and records which bytes it ran.

    Another file under the same noise is another run.
    """

    def __init__(self) -> None:
        self.sha256: dict[str, str] = {}

    def load(self, text: str) -> Any:
        """Return the function or class of this name. Raise BadInput if the file cannot be read."""
        if not is_file(text):
            return load(text)
        path = parse(text)[0]
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise BadInput(
                f"the file {path} cannot be read ({type(error).__name__}); give FILE.py:NAME"
            ) from None
        self.sha256[str(Path(path).resolve())] = hashlib.sha256(content).hexdigest()
        return named(run(content, path), text)

    def of(self, **words: str) -> dict[str, str]:
        """Return the SHA-256 of each word that is FILE.py:NAME, as the file was loaded."""
        return {
            f"{what}_sha256": self.sha256[str(Path(parse(text)[0]).resolve())]
            for what, text in words.items()
            if is_file(text)
        }


def refuse_imports(*words: str) -> None:
    """Raise BadInput if a file of the user's own uses something that may have changed since its run
    began.
    """
    for path in dict.fromkeys(parse(text)[0] for text in words if is_file(text)):
        if used := sorted(_unknown(ast.parse(Path(path).read_bytes()))):
            raise BadInput(
                f"the file {path} uses {', '.join(used)}, which may have changed since the run "
                "began, so its run is not resumed; start another with --new, or use only the "
                "standard library, torch, numpy and scipy"
            )


def _unknown(tree: ast.AST) -> set[str]:
    """Return the imports and builtins of a file whose version is not recorded."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or "").partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            names.add(node.id)
    return {name for name in names if not (name in IMPORTED and _installed(name))}


def _installed(name: str) -> bool:
    """Return whether the import finds the installed package, not a file of the same name in the
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
    """Return the public facts for run.json: the code, the start, the noise multipliers bit for bit,
    and the versions and machine that compute the run.
    """
    return {
        **code,
        "start": hashlib.sha256(start.contiguous().numpy().tobytes()).hexdigest(),
        "noise": {
            kind: [number.hex() for name in m.noise for number in _numbers(getattr(m, name))]
            for kind, m in mechanisms.items()
        },
        **{name: version(name) for name in PACKAGES},
        # This version also names the build, such as +cpu.
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        "native": native.library() is not None,
    }


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a tensor or of a single number."""
    return torch.as_tensor(value, dtype=torch.float64).flatten().tolist()
