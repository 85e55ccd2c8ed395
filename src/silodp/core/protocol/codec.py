"""Encode and decode queries and replies, the one small protocol of a gate daemon.

It has no pickle, no code and no I/O. It imports only core.

`frames` has the outside of a frame: key, signature and length. The body is a safetensors file. Its
header's metadata holds one JSON text under "silodp", and the points are its tensors. A body is
canonical: sorted keys, no spaces, floats as hex, tensors in the order of their names without gaps.
The decoder encodes the value it has read, and refuses a body that differs in a single byte. So
there is no way in for unknown or repeated fields, other spellings of a number, holes or trailing
bytes. And the SHA-256 of the body names the query.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.fields import POINT
from silodp.core.protocol.canonical import (
    Tensors,
    array,
    as_json,
    hexhash,
    integer,
    name,
    read_event,
    read_mechanism,
    read_named,
    real,
    tensor,
    write_event,
    write_mechanism,
    write_named,
)
from silodp.core.protocol.frames import COMMON, PACKED, VERSION, open_frame, open_signed, sign_frame
from silodp.core.protocol.frames import OVERHEAD as OVERHEAD
from silodp.core.protocol.packing import Packing
from silodp.core.query import Query
from silodp.core.sampling import SAMPLINGS
from silodp.core.statistics import STATISTICS

QUERY = b"SDPQ"
REPLY = b"SDPR"
MAX_HEADER = 2**13
"""The longest header of a body, in bytes.

All names are short, so a longer header is junk. It is refused before it is parsed.
"""
_DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "U8": np.dtype("u1")}
Pieces = list[bytes | memoryview]
_TYPES = {dtype.itemsize: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Envelope:
    """A query as it is sent to one silo, for one run.

    It has one run's values (J = 1, one clip, one noise multiplier) and its own query id. `model` is
    the SHA-256 of the problem's definition.
    """

    silo: str
    run: str
    query_id: str
    model: str
    query: Query
    round: str = ""
    """The name of the round, in a query for a total. It is the same for all silos."""
    attempt: int = 0
    """In a masked query, how often the round was asked before."""
    cohort: bytes = b""
    """In a masked query, the table of the round's cohort (core.protocol.masks)."""
    version: int = VERSION
    """The version of the frame. It is 2 from a server that does not read packed answers."""

    @property
    def shuffle_round(self) -> str:
        """Return the SHA-256 of the query without the silo and its own query id.

        So contributions to one round answer one query.
        """
        return hashlib.sha256(
            b"".join(_query_body(dataclasses.replace(self, silo="all", query_id="all")))
        ).hexdigest()


@dataclass(frozen=True, eq=False)
class Answer:
    """A silo's release, as the server reads it: `value` (1, d) and the state of the silo's ledger.

    The state is the number of entries after the charge, and the hash of the last one. With a
    packing the numbers are sent as integers, otherwise in float64.
    """

    silo: str
    query_id: str
    digest: str
    value: Tensor
    event: Event
    count: int
    head: str
    packing: Packing | None = None


@dataclass(frozen=True, eq=False)
class Sealed:
    """A silo's answer to a query for a total: a box (core.box) that the server can only pass on to
    the shuffler, or masked numbers, which tell something only in the sum over the whole cohort."""

    silo: str
    query_id: str
    digest: str
    box: bytes
    event: TotalEvent
    count: int
    head: str


@dataclass(frozen=True)
class Refusal:
    """A gate's refusal: a code, and the SHA-256 of the question's whole frame.

    The hash is empty if the daemon refused before it read a frame.
    """

    code: str
    digest: str = dataclasses.field(default="", compare=False)


# --- queries -------------------------------------------------------------------------------------


def encode_query(envelope: Envelope, private_key: Ed25519PrivateKey) -> bytes:
    """Return the signed frame of a query. Raise BadInput if it is not a query for one run."""
    return sign_frame(QUERY, envelope.version, _query_body(envelope), private_key)


def numbers_at(frame: bytes) -> int:
    """Return the offset at which the numbers of a frame begin.

    The frame must come from this module. Frames to several silos about one point are alike from
    there on.
    """
    return OVERHEAD + 8 + int.from_bytes(frame[OVERHEAD : OVERHEAD + 8], "little")


def decode_query(frame: bytes, *, limit: int) -> tuple[Envelope, str, str]:
    """Return the envelope, the asker's public key and the SHA-256 of the body, the last two in hex.

    Raise Refused("size" | "malformed" | "version" | "signature") on any other bytes, and no other
    exception. A frame of more than `limit` bytes is refused. Nothing is parsed before the signature
    is checked. The policy and the gate check later whether the values make sense and who the asker
    is.
    """
    body, key = open_signed(frame, QUERY, limit)
    envelope = _parsed(body, _read_query, lambda envelope, received: _query_body(envelope))
    return dataclasses.replace(envelope, version=frame[4]), key, hashlib.sha256(body).hexdigest()


def _query_body(envelope: Envelope) -> Pieces:
    """Return the body of a query, in pieces."""
    tensors: Tensors = {}
    mechanism = envelope.query.mechanism
    fields = {
        "mechanism": write_mechanism(mechanism),
        "model": hexhash(envelope.model),
        "query": name(envelope.query_id),
        "run": name(envelope.run),
        "sampling": write_named(mechanism.sampling, tensors),
        "silo": name(envelope.silo),
        "statistic": write_named(envelope.query.statistic, tensors),
    }
    if mechanism.total:
        fields["round"] = name(envelope.round)
    if mechanism.masked:
        fields["attempt"] = integer(envelope.attempt)
        tensors["cohort"] = np.frombuffer(envelope.cohort, np.uint8)
    return _body(fields, tensors)


def _read_query(fields: dict, tensors: Tensors) -> Envelope:
    """Return the envelope that the fields and tensors of a body describe."""
    mechanism = read_mechanism(
        fields["mechanism"], read_named(SAMPLINGS, fields["sampling"], tensors)
    )
    query = Query(read_named(STATISTICS, fields["statistic"], tensors), mechanism)
    names = (
        name(fields["silo"]),
        name(fields["run"]),
        name(fields["query"]),
        hexhash(fields["model"]),
    )
    if mechanism.masked:
        cohort = tensors["cohort"].tobytes()
    else:
        cohort = b""
    return Envelope(*names, query, fields.get("round", ""), fields.get("attempt", 0), cohort)


# --- replies -------------------------------------------------------------------------------------


def encode_reply(
    reply: Answer | Sealed | Refusal, private_key: Ed25519PrivateKey | None = None
) -> bytes:
    """Return the frame of a reply, signed by the silo if there is a key.

    Its length depends on d and public names only.
    """
    version = COMMON
    if isinstance(reply, Sealed):
        version = VERSION
    elif isinstance(reply, Answer) and reply.packing:
        version = PACKED
    return sign_frame(REPLY, version, _reply_body(reply), private_key)


def decode_reply(
    frame: bytes, *, limit: int, silo_key: str | None = None
) -> Answer | Sealed | Refusal:
    """Return a silo's reply. Raise Refused as `decode_query` does.

    With `silo_key` (hex) only a reply signed by that key is accepted.

    Decoding takes at most twice the frame's length of further memory: once for the body and, until
    the signature is checked, once for the signed bytes. Then it takes 8 bytes for each number.
    """
    body, key = open_frame(frame, REPLY, limit)
    if silo_key is not None and key != silo_key:
        raise Refused("signature")
    return _parsed(body, _read_reply, _reply_body)


def _reply_body(reply: Answer | Sealed | Refusal, received: Tensors | None = None) -> Pieces:
    """Return the body of a reply, in pieces.

    `received` has the tensors of a decoded body. Their packed numbers are used as they are: each
    integer has one spelling, so packing again would only cost time.
    """
    if isinstance(reply, Refusal):
        refusal = {"refused": name(reply.code)}
        if reply.digest:
            refusal["digest"] = hexhash(reply.digest)
        return _body(refusal, {})
    if isinstance(reply, Sealed):
        tensors = {"box": np.frombuffer(reply.box, np.uint8)}
    elif reply.packing and received:
        tensors = {"value": received["value"]}
    else:
        value = array(reply.value.double(), POINT)
        if reply.packing:
            value = reply.packing.packed(value[0])
        tensors = {"value": value}
    fields = {
        "digest": hexhash(reply.digest),
        "event": write_event(reply.event),
        "query": name(reply.query_id),
        "silo": name(reply.silo),
        "ledger": {"count": integer(reply.count), "head": hexhash(reply.head)},
    }
    if isinstance(reply, Answer) and reply.packing:
        fields["packed"] = {
            "divisor": real(reply.packing.divisor),
            "unit": real(reply.packing.unit),
        }
    return _body(fields, tensors)


def _read_reply(fields: dict, tensors: Tensors) -> Answer | Sealed | Refusal:
    """Return the reply that the fields and tensors of a body describe."""
    if "refused" in fields:
        code = name(fields["refused"])
        if "digest" in fields:
            return Refusal(code, hexhash(fields["digest"]))
        return Refusal(code)
    names = name(fields["silo"]), name(fields["query"]), hexhash(fields["digest"])
    event = read_event(fields["event"])
    at = (integer(fields["ledger"]["count"]), hexhash(fields["ledger"]["head"]))
    if event.total:
        return Sealed(*names, tensors["box"].tobytes(), event, *at)
    if "packed" not in fields:
        return Answer(*names, tensor(tensors["value"], POINT), event, *at)
    unit, divisor = (float.fromhex(fields["packed"][key]) for key in ("unit", "divisor"))
    raw = tensors["value"]
    if raw.dtype != np.uint8 or raw.ndim != 2:
        raise BadInput(
            f"packed numbers have the type {raw.dtype} and the shape {raw.shape}; they must be "
            "bytes, one row for each number"
        )
    packing = Packing(unit, divisor, raw.shape[1])
    return Answer(*names, torch.from_numpy(packing.unpacked(raw))[None], event, *at, packing)


# --- frames --------------------------------------------------------------------------------------


def _body(fields: dict, tensors: dict[str, np.ndarray]) -> Pieces:
    """Return the body in pieces. The long pieces are the tensors' own memory."""
    header: dict[str, Any] = {"__metadata__": {"silodp": as_json(fields)}}
    end = 0
    for key, values in sorted(tensors.items()):
        header[key] = {
            "data_offsets": [end, end := end + values.nbytes],
            "dtype": _TYPES[values.itemsize],
            "shape": list(values.shape),
        }
    text = as_json(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    numbers = (
        np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        for _, values in sorted(tensors.items())
    )
    return [len(text).to_bytes(8, "little"), text, *numbers]


def _parsed(body: bytes, read, write) -> Any:
    """Return what `read` makes of the body.

    Raise Refused("malformed") on any error, or if `write` makes another body of that value and of
    the received tensors.
    """
    try:
        fields, tensors = _split(body)
        value = read(fields, tensors)
        if _same(write(value, tensors), body):
            return value
    except Exception:
        # These bytes come from outside. A parser can raise anything, and nothing of it may leave
        # the gate.
        pass
    raise Refused("malformed")


def _same(pieces: Pieces, body: bytes) -> bool:
    """Return whether the pieces make up the body, without joining them."""
    at = 0
    for piece in pieces:
        if not body.startswith(piece, at):
            return False
        at += len(piece)
    return at == len(body)


def _split(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the fields and tensors of a body. Raise an exception of any kind if it has another
    form.
    """
    size = int.from_bytes(body[:8], "little")
    if size > min(MAX_HEADER, len(body) - 8):
        raise BadInput("the header is longer than the body or than any header may be")
    header = json.loads(body[8 : 8 + size])
    fields = json.loads(header.pop("__metadata__")["silodp"])
    tensors = {}
    start = 8 + size
    for key in sorted(header):
        dtype = _DTYPES[header[key]["dtype"]]
        shape = [integer(n) for n in header[key]["shape"]]
        end = start + math.prod(shape) * dtype.itemsize
        part: bytes | memoryview = memoryview(body)[start:end]
        if dtype != np.uint8:
            part = bytes(part)  # numbers that kernels read get memory of their own
        tensors[key] = np.frombuffer(part, dtype).reshape(shape)  # raises if the part is too short
        start = end
    return fields, tensors
