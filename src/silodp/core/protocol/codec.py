"""Bytes <-> queries and replies: the one small protocol that a gate daemon speaks. No pickle, no code, no I/O; imports only core.

`frames` has the outside of a frame: key, signature and length. The body is a safetensors file: its header's metadata holds one JSON text under "silodp",
and the points are its tensors. A body is canonical: sorted keys, no spaces, floats as hex, tensors in the order of their names without
gaps. The decoder writes again what it read and refuses a body that differs in a single byte, so unknown or repeated fields, other
spellings of a number, holes and trailing bytes have no way in, and SHA-256 of the body names the query.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from silodp.core import sampling as samplings
from silodp.core import statistics
from silodp.core.errors import BadInput, Refused
from silodp.core.events import Event, TotalEvent
from silodp.core.mechanisms import Gaussian, Mechanism, Shuffled
from silodp.core.protocol.frames import OVERHEAD as OVERHEAD
from silodp.core.protocol.frames import VERSION, open_frame, sign_frame
from silodp.core.query import Query

QUERY, REPLY = b"SDPQ", b"SDPR"
MAX_HEADER = 2**13
"""Bytes of a body's header. All names are short, so a longer one is junk, and is refused before it is parsed."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DTYPES = {"F32": np.dtype("<f4"), "F64": np.dtype("<f8"), "U8": np.dtype("u1")}
_TYPES = {dtype.itemsize: name for name, dtype in _DTYPES.items()}

Table = dict[str, tuple[Any, dict[str, str]]]
POINT, VECTOR, INTEGER, REAL, NAME = "point", "vector", "integer", "real", "name"
_STATISTICS: Table = {
    "Grad": (statistics.Grad, {"w": POINT}),
    "GradDiff": (statistics.GradDiff, {"w": POINT, "reference": POINT}),
    "LocalSteps": (statistics.LocalSteps, {"w": POINT, "steps": INTEGER, "step": REAL}),
    "SteeredSteps": (statistics.SteeredSteps, {"w": POINT, "steps": INTEGER, "step": REAL, "drift": POINT}),
    "Histogram": (statistics.Histogram, {"edges": VECTOR, "features": INTEGER}),
    "Moments": (statistics.Moments, {"low": VECTOR, "high": VECTOR}),
    "Score": (statistics.Score, {"w": POINT, "bins": INTEGER, "cap": REAL}),
    "ClassCounts": (statistics.ClassCounts, {"classes": INTEGER}),
    "MissingRates": (statistics.MissingRates, {"features": INTEGER}),
}
_SAMPLINGS: Table = {
    "FullBatch": (samplings.FullBatch, {}),
    "DisjointBatches": (samplings.DisjointBatches, {"batches": INTEGER, "index": INTEGER, "partition": NAME}),
    "Poisson": (samplings.Poisson, {"rate": REAL}),
    "WithoutReplacement": (samplings.WithoutReplacement, {"rate": REAL}),
}


@dataclass(frozen=True, eq=False)
class Envelope:
    """A query as it is sent: to one silo, for one run (J = 1, one clip, one noise multiplier), under an id of its own, about the problem
    whose definition has this SHA-256."""

    silo: str
    run: str
    query_id: str
    model: str
    query: Query
    round: str = ""
    """Names the round of a shuffled query: all silos are asked under the same name."""
    version: int = VERSION

    @property
    def shuffle_round(self) -> str:
        """SHA-256 of the question but for the silo and its own query id: contributions to one round answer one question."""
        return hashlib.sha256(_query_body(dataclasses.replace(self, silo="all", query_id="all"))).hexdigest()


@dataclass(frozen=True, eq=False)
class Answer:
    """What a silo lets out, as the server reads it: `value` (1, d), and the silo's ledger after the charge (entries, hash of the last)."""

    silo: str
    query_id: str
    digest: str
    value: Tensor
    event: Event
    count: int
    head: str


@dataclass(frozen=True, eq=False)
class Sealed:
    """A silo's answer to a shuffled query: a box (core.box) that the server can only pass on to the shuffler."""

    silo: str
    query_id: str
    digest: str
    box: bytes
    event: TotalEvent
    count: int
    head: str


@dataclass(frozen=True)
class Refusal:
    """The gate's no: a code, and the SHA-256 of the question's whole frame; empty where the daemon had no question to look at."""

    code: str
    digest: str = dataclasses.field(default="", compare=False)


# --- queries --------------------------------------------------------------------------------------------------------------------


def encode_query(envelope: Envelope, private_key: Ed25519PrivateKey) -> bytes:
    """The signed frame of a query; raises BadInput where it is not a query for one run."""
    return sign_frame(QUERY, envelope.version, _query_body(envelope), private_key)


def decode_query(frame: bytes, *, limit: int) -> tuple[Envelope, str, str]:
    """(envelope, the asker's public key, SHA-256 of the body), keys and hashes in hex, of a frame of at most `limit` bytes.

    On any bytes whatever: raises Refused("size" | "malformed" | "version" | "signature") or nothing. Nothing is parsed before the
    signature holds. Whether the values make sense, and whether the asker is anybody, is for the policy and the gate to say.
    """
    body, key = open_frame(frame, QUERY, limit)
    if key is None:
        raise Refused("signature")
    return _parsed(body, _read_query, _query_body), key, hashlib.sha256(body).hexdigest()


def _query_body(envelope: Envelope) -> bytes:
    tensors: dict[str, np.ndarray] = {}
    mechanism = envelope.query.mechanism
    fields = {
        "mechanism": _pack_mechanism(mechanism),
        "model": _hash(envelope.model),
        "query": _name(envelope.query_id),
        "run": _name(envelope.run),
        "sampling": _pack(mechanism.sampling, _SAMPLINGS, tensors),
        "silo": _name(envelope.silo),
        "statistic": _pack(envelope.query.statistic, _STATISTICS, tensors),
    }
    if isinstance(mechanism, Shuffled):
        fields["round"] = _name(envelope.round)
    return _body(fields, tensors)


def _pack_mechanism(mechanism: Mechanism) -> dict:
    both = {"clip": _real(mechanism.clip), "kind": _name(mechanism.kind)}
    if isinstance(mechanism, Shuffled):
        return both | _coins(mechanism)
    return both | {"noise_multiplier": _real(mechanism.noise_multiplier)}


def _coins(of: Shuffled | TotalEvent) -> dict:
    return {name: _integer(getattr(of, name)) for name in ("levels", "noise_bits", "contributions")} | {"p": _real(of.p)}


def _unpack_mechanism(packed: dict, sampling: samplings.Sampling) -> Mechanism:
    kind, clip = _name(packed["kind"]), float.fromhex(packed["clip"])
    if "noise_multiplier" in packed:
        return Gaussian(kind, clip, float.fromhex(packed["noise_multiplier"]), sampling)
    levels, bits, contributions = (_integer(packed[name]) for name in ("levels", "noise_bits", "contributions"))
    return Shuffled(kind, clip, levels, bits, contributions, float.fromhex(packed["p"]), sampling)


def _read_query(fields: dict, tensors: dict[str, np.ndarray]) -> Envelope:
    mechanism = _unpack_mechanism(fields["mechanism"], _unpack(fields["sampling"], _SAMPLINGS, tensors))
    query = Query(_unpack(fields["statistic"], _STATISTICS, tensors), mechanism)
    names = _name(fields["silo"]), _name(fields["run"]), _name(fields["query"]), _hash(fields["model"])
    return Envelope(*names, query, fields.get("round", ""))


# --- replies --------------------------------------------------------------------------------------------------------------------


def encode_reply(reply: Answer | Sealed | Refusal, private_key: Ed25519PrivateKey | None = None) -> bytes:
    """The frame of an answer or a refusal, signed by the silo where it has a key. Its length tells nothing but d and public names."""
    return sign_frame(REPLY, VERSION, _reply_body(reply), private_key)


def decode_reply(frame: bytes, *, limit: int, silo_key: str | None = None) -> Answer | Sealed | Refusal:
    """A silo's reply; raises Refused as `decode_query` does. With `silo_key` (hex) only a reply signed by that key is accepted."""
    body, key = open_frame(frame, REPLY, limit)
    if silo_key is not None and key != silo_key:
        raise Refused("signature")
    return _parsed(body, _read_reply, _reply_body)


def _reply_body(reply: Answer | Sealed | Refusal) -> bytes:
    if isinstance(reply, Refusal):
        return _body({"refused": _name(reply.code)} | ({"digest": _hash(reply.digest)} if reply.digest else {}), {})
    if isinstance(reply, Sealed):
        tensors = {"box": np.frombuffer(reply.box, np.uint8)}
        event = _coins(reply.event) | {"dimension": _integer(reply.event.dimension)}
    else:
        tensors = {"value": _array(reply.value.double(), POINT)}
        event = {"noise_multiplier": _real(reply.event.noise_multiplier)}
    event |= {"count": _integer(reply.event.count), "sampling": _pack(reply.event.sampling, _SAMPLINGS, tensors)}
    ledger = {"count": _integer(reply.count), "head": _hash(reply.head)}
    fields = {"digest": _hash(reply.digest), "event": event, "ledger": ledger, "query": _name(reply.query_id), "silo": _name(reply.silo)}
    return _body(fields, tensors)


def _read_reply(fields: dict, tensors: dict[str, np.ndarray]) -> Answer | Sealed | Refusal:
    if "refused" in fields:
        return Refusal(_name(fields["refused"]), _hash(fields["digest"]) if "digest" in fields else "")
    event, ledger = fields["event"], fields["ledger"]
    sampling, count = _unpack(event["sampling"], _SAMPLINGS, tensors), _integer(event["count"])
    names = _name(fields["silo"]), _name(fields["query"]), _hash(fields["digest"])
    at = _integer(ledger["count"]), _hash(ledger["head"])
    if "box" in tensors:
        coins = _unpack_mechanism(event | {"kind": "-", "clip": "0"}, sampling)
        spent = coins.event(count, _integer(event["dimension"]))
        return Sealed(*names, tensors["box"].tobytes(), spent, *at)
    return Answer(*names, _tensor(tensors["value"], POINT), Event(sampling, float.fromhex(event["noise_multiplier"]), count), *at)


# --- frames ---------------------------------------------------------------------------------------------------------------------


def _body(fields: dict, tensors: dict[str, np.ndarray]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"silodp": _json(fields)}}
    end = 0
    for name, array in sorted(tensors.items()):
        header[name] = {"data_offsets": [end, end := end + array.nbytes], "dtype": _TYPES[array.itemsize], "shape": list(array.shape)}
    text = _json(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in sorted(tensors.items()))


def _parsed(body: bytes, read, write) -> Any:
    """What `read` makes of the body, if `write` makes the same body of it; else Refused("malformed"), whatever went wrong."""
    try:
        value = read(*_split(body))
        if write(value) == body:
            return value
    except Exception:  # bytes from outside: a parser's complaints are as many as its authors' thoughts, and none may get through
        pass
    raise Refused("malformed")


def _split(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    size = int.from_bytes(body[:8], "little")
    if size > min(MAX_HEADER, len(body) - 8):
        raise BadInput("the header is longer than the body or than any header may be")
    header = json.loads(body[8 : 8 + size])
    fields = json.loads(header.pop("__metadata__")["silodp"])
    tensors, start = {}, 8 + size
    for name in sorted(header):
        dtype, shape = _DTYPES[header[name]["dtype"]], [_integer(n) for n in header[name]["shape"]]
        end = start + math.prod(shape) * dtype.itemsize
        tensors[name] = np.frombuffer(body[start:end], dtype).reshape(shape)  # a slice too short for the shape raises
        start = end
    return fields, tensors


def _json(value: dict) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- fields: each of these takes a value of the right type and range, or raises BadInput --------------------------------------------


def _pack(value: object, table: Table, tensors: dict[str, np.ndarray]) -> dict:
    name = type(value).__name__
    packed: dict[str, Any] = {"name": name}
    for field, kind in table[name][1].items():
        content = getattr(value, field)
        if kind in (POINT, VECTOR):
            tensors[field] = _array(content, kind)
        else:
            packed[field] = _integer(content) if kind == INTEGER else _real(content) if kind == REAL else _name(content)
    return packed


def _unpack(packed: dict, table: Table, tensors: dict[str, np.ndarray]) -> Any:
    make, kinds = table[packed["name"]]
    readers = {INTEGER: _integer, REAL: float.fromhex, NAME: _name}
    return make(**{f: _tensor(tensors[f], k) if k in (POINT, VECTOR) else readers[k](packed[f]) for f, k in kinds.items()})


def _array(tensor: Tensor, kind: str) -> np.ndarray:
    """The tensor as little-endian float32 or float64, in the shape of a point (1, d) or a vector (k)."""
    array = tensor.detach().cpu().numpy()
    if array.dtype not in (np.float32, np.float64) or (array.ndim != 1 if kind == VECTOR else array.ndim != 2 or len(array) != 1):
        raise BadInput(f"a {kind} has shape {array.shape} and type {array.dtype}; it must be (1, d), a vector (k,), of float32 or float64")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def _tensor(array: np.ndarray, kind: str) -> Tensor:
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    _array(tensor, kind)
    return tensor


def _real(value: float | Tensor) -> str:
    """A finite number as hex, so that not a bit of it is lost or has two spellings."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise BadInput(f"a hyper-parameter has {value.numel()} values; over the wire each silo is asked with one")
    number = float(value)
    if not math.isfinite(number):
        raise BadInput(f"a hyper-parameter is {number}; it must be finite")
    return number.hex()


def _integer(value: int) -> int:
    if type(value) is not int or abs(value) > 2**53:
        raise BadInput(f"a count is {value!r:.40}; it must be an integer of at most 2^53")
    return value


def _name(text: str, pattern: re.Pattern[str] = _NAME) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise BadInput(f"a name or hash is {text!r:.80}; it must match {pattern.pattern}")
    return text


def _hash(text: str) -> str:
    return _name(text, _HASH)
