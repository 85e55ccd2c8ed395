"""Fields in their one spelling: each function takes a value of the right type and range, or raises
BadInput. Imports only core.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.events import EVENTS, Event, TotalEvent
from silodp.core.fields import INTEGER, NAME, POINT, REAL, VECTOR
from silodp.core.mechanisms import MECHANISMS, Mechanism
from silodp.core.sampling import SAMPLINGS, Sampling

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)

Tensors = dict[str, np.ndarray]


as_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def real(value: float | Tensor) -> str:
    """A finite number as hex, so that not a bit of it is lost or has two spellings."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise BadInput(
            f"a hyper-parameter has {value.numel()} values; over the wire each silo is "
            "asked with one"
        )
    number = float(value)
    if not math.isfinite(number):
        raise BadInput(f"a hyper-parameter is {number}; it must be finite")
    return number.hex()


def integer(value: int) -> int:
    if type(value) is not int or abs(value) > 2**53:
        raise BadInput(f"a count is {value!r:.40}; it must be an integer of at most 2^53")
    return value


def name(text: str, pattern: re.Pattern[str] = _NAME) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise BadInput(f"a name or hash is {text!r:.80}; it must match {pattern.pattern}")
    return text


def hexhash(text: str) -> str:
    return name(text, _HASH)


def array(tensor: Tensor, kind: str) -> np.ndarray:
    """The tensor as little-endian float32 or float64, in the shape of a point (1, d) or a vector
    (k).
    """
    values = tensor.detach().cpu().numpy()
    if values.dtype not in (np.float32, np.float64) or (
        values.ndim != 1 if kind == VECTOR else values.ndim != 2 or len(values) != 1
    ):
        raise BadInput(
            f"a {kind} has shape {values.shape} and type {values.dtype}; it must be (1, "
            "d), a vector (k,), of float32 or float64"
        )
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def tensor(values: np.ndarray, kind: str) -> Tensor:
    made = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    array(made, kind)
    return made


_WRITE = {INTEGER: integer, REAL: real, NAME: name}
_READ = {INTEGER: integer, REAL: float.fromhex, NAME: name}


def write_fields(value: Any, tensors: Tensors) -> dict[str, Any]:
    """The fields that `value.wire` names; points and vectors go to `tensors`."""
    packed: dict[str, Any] = {}
    for field, kind in value.wire.items():
        if kind in (POINT, VECTOR):
            tensors[field] = array(getattr(value, field), kind)
        else:
            packed[field] = _WRITE[kind](getattr(value, field))
    return packed


def read_fields(
    wire: Mapping[str, str], packed: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    return {
        f: tensor(tensors[f], k) if k in (POINT, VECTOR) else _READ[k](packed[f])
        for f, k in wire.items()
    }


def write_named(value: Any, tensors: Tensors) -> dict[str, Any]:
    return {"name": type(value).__name__} | write_fields(value, tensors)


def read_named(
    table: Mapping[str, type[Any]], packed: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Any:
    kind = table[packed["name"]]
    return kind(**read_fields(kind.wire, packed, tensors))


def _with_fields(kinds: Iterable[type[Any]], packed: Mapping[str, Any]) -> type[Any]:
    """The kind that has just these fields: of mechanisms and events it is they that tell which one
    it is.
    """
    (kind,) = (kind for kind in kinds if kind.wire.keys() == packed.keys())
    return kind


def write_mechanism(mechanism: Mechanism) -> dict[str, Any]:
    return write_fields(mechanism, {})


def read_mechanism(packed: Mapping[str, Any], sampling: Sampling) -> Mechanism:
    kind = _with_fields(MECHANISMS.values(), packed)
    return kind(**read_fields(kind.wire, packed, {}), sampling=sampling)


def write_event(event: Event | TotalEvent) -> dict[str, Any]:
    return write_fields(event, {}) | {
        "count": integer(event.count),
        "sampling": write_named(event.sampling, {}),
    }


def read_event(packed: Mapping[str, Any]) -> Any:
    own = {field: value for field, value in packed.items() if field not in ("count", "sampling")}
    kind = _with_fields(EVENTS, own)
    sampling = read_named(SAMPLINGS, packed["sampling"], {})
    return kind(
        sampling=sampling, count=integer(packed["count"]), **read_fields(kind.wire, own, {})
    )
