"""Load the weights of a frozen encoder, pinned by their hash in the FILE.py that uses them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from silodp.core.errors import BadInput


def frozen(path: str | Path, sha256: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name.

    Raise BadInput unless its bytes have this SHA-256. A policy approves FILE.py by its hash, and
    FILE.py pins the weights by theirs. So an officer who approves the file approves the weights.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(
            f"the weights {path} cannot be read ({type(error).__name__}); put them beside "
            "the file that names them"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        raise BadInput(
            f"the weights {path} have the SHA-256 {digest}, but {sha256} was approved; "
            "restore the file"
        )
    return load(data)
