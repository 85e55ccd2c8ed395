"""Write and read fields in their one spelling.

Each function takes a value of the right type and range, and raises BadInput on others. This module
imports only core.
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
    """Return a finite number as hex, which is exact and has one spelling.

    Raise BadInput on others.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise BadInput(
            f"a hyper-parameter has {value.numel()} values; a query to one silo must have one value"
        )
    number = float(value)
    if not math.isfinite(number):
        raise BadInput(f"a hyper-parameter is {number}; it must be finite")
    return number.hex()


def integer(value: int) -> int:
    """Return the value. Raise BadInput unless it is an integer of at most 2^53."""
    if type(value) is not int or abs(value) > 2**53:
        raise BadInput(f"a count is {value!r:.40}; it must be an integer of at most 2^53")
    return value


def name(text: str, pattern: re.Pattern[str] = _NAME) -> str:
    """Return the text. Raise BadInput unless it matches the pattern."""
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise BadInput(f"a name or hash is {text!r:.80}; it must match {pattern.pattern}")
    return text


def hexhash(text: str) -> str:
    """Return the text. Raise BadInput unless it is a SHA-256 in hex."""
    return name(text, _HASH)


def array(tensor: Tensor, kind: str) -> np.ndarray:
    """Return the tensor as little-endian float32 or float64.

    A point has the shape (1, d) and a vector (k,). Raise BadInput on another shape or type.
    """
    values = tensor.detach().cpu().numpy()
    if kind == VECTOR:
        shaped = values.ndim == 1
    else:
        shaped = values.ndim == 2 and len(values) == 1
    if values.dtype not in (np.float32, np.float64) or not shaped:
        raise BadInput(
            f"a {kind} has shape {values.shape} and type {values.dtype}; it must be (1, "
            "d), a vector (k,), of float32 or float64"
        )
    return np.ascontiguousarray(values, values.dtype.newbyteorder("<"))


def tensor(values: np.ndarray, kind: str) -> Tensor:
    """Return the numbers as a tensor. Raise BadInput as `array` does."""
    native = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
    array(native, kind)  # checks shape and type
    return native


_WRITE = {INTEGER: integer, REAL: real, NAME: name}
_READ = {INTEGER: integer, REAL: float.fromhex, NAME: name}


def write_fields(value: Any, tensors: Tensors) -> dict[str, Any]:
    """Return the fields that `value.wire` names. Put points and vectors into `tensors`."""
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
    """Return the fields that `wire` names, with points and vectors from `tensors`."""
    values: dict[str, Any] = {}
    for field, kind in wire.items():
        if kind in (POINT, VECTOR):
            values[field] = tensor(tensors[field], kind)
        else:
            values[field] = _READ[kind](packed[field])
    return values


def write_named(value: Any, tensors: Tensors) -> dict[str, Any]:
    """Return the fields of a value and the name of its class."""
    return {"name": type(value).__name__} | write_fields(value, tensors)


def read_named(
    table: Mapping[str, type[Any]], packed: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Any:
    """Return a value of the class that the fields name, from this table."""
    kind = table[packed["name"]]
    return kind(**read_fields(kind.wire, packed, tensors))


def _with_fields(kinds: Iterable[type[Any]], packed: Mapping[str, Any]) -> type[Any]:
    """Return the one class that has exactly these fields.

    Mechanisms and events have no name on the wire: their fields identify them.
    """
    (kind,) = (kind for kind in kinds if kind.wire.keys() == packed.keys())
    return kind


def write_mechanism(mechanism: Mechanism) -> dict[str, Any]:
    """Return the fields of a mechanism."""
    return write_fields(mechanism, {})


def read_mechanism(packed: Mapping[str, Any], sampling: Sampling) -> Mechanism:
    """Return the mechanism that has these fields."""
    kind = _with_fields(MECHANISMS.values(), packed)
    return kind(**read_fields(kind.wire, packed, {}), sampling=sampling)


def write_event(event: Event | TotalEvent) -> dict[str, Any]:
    """Return the fields of an event, with its count and sampling."""
    return write_fields(event, {}) | {
        "count": integer(event.count),
        "sampling": write_named(event.sampling, {}),
    }


def read_event(packed: Mapping[str, Any]) -> Any:
    """Return the event that has these fields."""
    rest = {field: value for field, value in packed.items() if field not in ("count", "sampling")}
    kind = _with_fields(EVENTS, rest)
    sampling = read_named(SAMPLINGS, packed["sampling"], {})
    return kind(
        sampling=sampling, count=integer(packed["count"]), **read_fields(kind.wire, rest, {})
    )
