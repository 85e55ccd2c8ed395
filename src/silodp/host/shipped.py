"""Read the constants of the feature maps that ship: files of the package, read once."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from safetensors.torch import load

from silodp.core.features import maps, pictures
from silodp.core.features.maps import Constants

HERE = Path(__file__).with_name("constants")
CODE = (Path(pictures.__file__), Path(maps.__file__))


@cache
def constants(name: str) -> Constants:
    """Return the constants of "photo" or "digit". Their hash covers the map's code too."""
    data = (HERE / f"{name}.safetensors").read_bytes()
    code_and_data = b"".join((*(path.read_bytes() for path in CODE), data))
    return Constants(
        {key: value.float() for key, value in load(data).items()},
        hashlib.sha256(code_and_data).hexdigest(),
    )
