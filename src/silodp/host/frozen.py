"""Weights of a frozen encoder, pinned by their hash in the FILE.py that uses them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from silodp.core.errors import BadInput


def frozen(path: str | Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name; BadInput unless its bytes have this SHA-256.

    A policy approves FILE.py by its hash, and FILE.py names the weights by theirs: so an officer
    who approves the file approves the weights.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(
            f"the weights {path} cannot be read ({type(error).__name__}); put them beside "
            "the file that names them"
        ) from None
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise BadInput(
            f"the weights {path} have the SHA-256 {found}, but {sha256} was approved; "
            "restore the file"
        )
    return load(data)
