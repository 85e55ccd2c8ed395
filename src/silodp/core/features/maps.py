"""The maps that ship, by name: `photo:M` for pictures of anything, `digit` for handwritten digits.
They need no download.

Their constants were learnt from public pictures that scikit-learn and matplotlib embed
(see `research.learn_features`), never from a silo's. So centring, scaling and principal axes of a
map that ships cost no budget. A definition names them by the hash of code and constants. The loader
of a user's FILE.py also loads the constants. This file reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.features import pictures

NORM = 3.0
"""Of every record's features: beside it the 1 of a model's offset takes little of what the clip
allows.
"""
MOST = 256
USUAL = 128


def parse(text: str) -> tuple[str, int]:
    """A shipped map's name, and its number of features."""
    name, _, count = text.partition(":")
    if name == "photo" and (not count or (count.isdigit() and 1 <= int(count) <= MOST)):
        return name, int(count or USUAL)
    if text == "digit":
        return text, 190
    raise BadInput(
        f"the features are {text!r}; use photo:M with M from 1 to {MOST}, digit, or "
        "FILE.py:NAME, a function of one record's features"
    )


def shape_of(features: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """(channels, height, width) of pictures of so many numbers: by the schema, or of squares, grey
    or in three colours.
    """
    for channels in (1, 3):
        side = round((features / channels) ** 0.5)
        shape = shape or ((channels, side, side) if channels * side * side == features else ())
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise BadInput(
            f"records of {features} numbers are no pictures of 8 x 8 pixels or more; give "
            "a schema with a table [images]"
        )
    return shape


@dataclass(frozen=True, eq=False)
class Constants:
    """A map's tensors, and the hash of them and of its code."""

    tensors: dict[str, Tensor]
    sha256: str


def source(text: str, constants: Constants) -> str:
    """What names the map in a problem's definition."""
    name, count = parse(text)
    return f"silodp.{name}:{count} sha256 {constants.sha256}"


def of(text: str, x: Tensor, constants: Constants) -> Tensor:
    """Features (n, M), of norm NORM each, of pictures (n, channels, height, width) within [-1,
    1].
    """
    name, count = parse(text)
    return NORM * (
        photo(x, count, constants.tensors) if name == "photo" else digit(x, constants.tensors)
    )


def photo(x: Tensor, count: int, c: dict[str, Tensor]) -> Tensor:
    seen = pictures.photo(pictures.sized(x, 3, 32), c["filters"], c["offset"])
    return _axes(seen, c, count)


def digit(x: Tensor, c: dict[str, Tensor]) -> Tensor:
    ink = pictures.inked(pictures.sized(x, 1, 28))
    layers = [(c[f"weight{k}"], c[f"bias{k}"]) for k in range(4)]
    known = F.normalize(
        (pictures.strokes(pictures.boxed(ink), layers) - c["strokes.centre"]) @ c["strokes.axes"]
    )
    return torch.cat([known, _axes(pictures.edges(ink).flatten(1), c, 150)], 1) / 2**0.5


def _axes(seen: Tensor, c: dict[str, Tensor], count: int) -> Tensor:
    """On the first principal axes of public pictures, half-whitened, and of norm 1."""
    return F.normalize(
        ((seen * c["weight"] - c["centre"]) @ c["axes"][:, :count]) * c["scale"][:count]
    )
