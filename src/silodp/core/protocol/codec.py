"""Bytes <-> queries and replies: the one small protocol that a gate daemon speaks. No pickle, no
code, no I/O; imports only core.

`frames` has the outside of a frame: key, signature and length. The body is a safetensors file: its
header's metadata holds one JSON text under "silodp", and the points are its tensors. A body is
canonical: sorted keys, no spaces, floats as hex, tensors in the order of their names without gaps.
The decoder writes again what it read and refuses a body that differs in a single byte, so unknown
or repeated fields, other spellings of a number, holes and trailing bytes have no way in, and
SHA-256 of the body names the query.
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
"""Bytes of a body's header. All names are short, so a longer one is junk, and is refused before it
is parsed.
"""
_DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "U8": np.dtype("u1")}
Pieces = list[bytes | memoryview]
_TYPES = {dtype.itemsize: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Envelope:
    """A query as it is sent: to one silo, for one run (J = 1, one clip, one noise multiplier),
    under an id of its own, about the problem whose definition has this SHA-256."""

    silo: str
    run: str
    query_id: str
    model: str
    query: Query
    round: str = ""
    """Names the round of a query for a total: all silos are asked under the same name."""
    attempt: int = 0
    cohort: bytes = b""
    """Of a masked query: how often the round was asked before, and the table of its cohort
    (core.protocol.masks).
    """
    version: int = VERSION
    """Of the frame; 2 from a server that reads no packed answers."""

    @property
    def shuffle_round(self) -> str:
        """SHA-256 of the question but for the silo and its own query id: contributions to one round
        answer one question.
        """
        return hashlib.sha256(
            b"".join(_query_body(dataclasses.replace(self, silo="all", query_id="all")))
        ).hexdigest()


@dataclass(frozen=True, eq=False)
class Answer:
    """What a silo lets out, as the server reads it: `value` (1, d), and the silo's ledger after the
    charge (entries, hash of the last).

    With a packing the numbers are sent as its integers, else in float64.
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
    """The gate's no: a code, and the SHA-256 of the question's whole frame; empty where the daemon
    had no question to look at.
    """

    code: str
    digest: str = dataclasses.field(default="", compare=False)


# --- queries -------------------------------------------------------------------------------------


def encode_query(envelope: Envelope, private_key: Ed25519PrivateKey) -> bytes:
    """The signed frame of a query; raises BadInput where it is not a query for one run."""
    return sign_frame(QUERY, envelope.version, _query_body(envelope), private_key)


def numbers_at(frame: bytes) -> int:
    """Where the numbers of a frame begin, that this module has made: questions to several silos
    about one point are alike from there on.
    """
    return OVERHEAD + 8 + int.from_bytes(frame[OVERHEAD : OVERHEAD + 8], "little")


def decode_query(frame: bytes, *, limit: int) -> tuple[Envelope, str, str]:
    """(envelope, the asker's public key, SHA-256 of the body), keys and hashes in hex, of a frame
    of at most `limit` bytes.

    On any bytes whatever: raises Refused("size" | "malformed" | "version" | "signature") or
    nothing. Nothing is parsed before the signature holds. Whether the values make sense, and
    whether the asker is anybody, is for the policy and the gate to say.
    """
    body, key = open_signed(frame, QUERY, limit)
    envelope = _parsed(body, _read_query, lambda envelope, came: _query_body(envelope))
    return dataclasses.replace(envelope, version=frame[4]), key, hashlib.sha256(body).hexdigest()


def _query_body(envelope: Envelope) -> Pieces:
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
    """The frame of an answer or a refusal, signed by the silo where it has a key. Its length tells
    nothing but d and public names.
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
    """A silo's reply; raises Refused as `decode_query` does. With `silo_key` (hex) only a reply
    signed by that key is accepted.

    It takes the frame's length twice more at most, for the body and, until the signature holds, for
    what was signed; then 8 bytes for a number.
    """
    body, key = open_frame(frame, REPLY, limit)
    if silo_key is not None and key != silo_key:
        raise Refused("signature")
    return _parsed(body, _read_reply, _reply_body)


def _reply_body(reply: Answer | Sealed | Refusal, came: Tensors | None = None) -> Pieces:
    """Packed numbers that came with the reply are not packed again: no two spellings are one
    integer.
    """
    if isinstance(reply, Refusal):
        return _body(
            {"refused": name(reply.code)}
            | ({"digest": hexhash(reply.digest)} if reply.digest else {}),
            {},
        )
    if isinstance(reply, Sealed):
        tensors = {"box": np.frombuffer(reply.box, np.uint8)}
    elif reply.packing and came:
        tensors = {"value": came["value"]}
    else:
        value = array(reply.value.double(), POINT)
        tensors = {"value": reply.packing.packed(value[0]) if reply.packing else value}
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
    if "refused" in fields:
        return Refusal(
            name(fields["refused"]), hexhash(fields["digest"]) if "digest" in fields else ""
        )
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
        raise BadInput("packed numbers are bytes, a row for each")
    packing = Packing(unit, divisor, raw.shape[1])
    return Answer(*names, torch.from_numpy(packing.unpacked(raw))[None], event, *at, packing)


# --- frames --------------------------------------------------------------------------------------


def _body(fields: dict, tensors: dict[str, np.ndarray]) -> Pieces:
    """The body in pieces, of which the long ones are the tensors' own memory."""
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
    """What `read` makes of the body, if `write` makes the same body of it (and of its tensors, as
    they came); else Refused("malformed"), whatever went wrong.
    """
    try:
        fields, tensors = _split(body)
        value = read(fields, tensors)
        if _same(write(value, tensors), body):
            return value
    except Exception:
        # bytes from outside: a parser's complaints are as many as its authors' thoughts, and none
        # may get through
        pass
    raise Refused("malformed")


def _same(pieces: Pieces, body: bytes) -> bool:
    """Whether the pieces make the body, without putting them together."""
    at = 0
    for piece in pieces:
        if not body.startswith(piece, at):
            return False
        at += len(piece)
    return at == len(body)


def _split(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
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
        part = memoryview(body)[
            start:end
        ]  # bytes are read where they lie; numbers, which kernels see, in memory of their own
        tensors[key] = np.frombuffer(part if dtype == np.uint8 else bytes(part), dtype).reshape(
            shape
        )  # one too short for the shape raises
        start = end
    return fields, tensors
