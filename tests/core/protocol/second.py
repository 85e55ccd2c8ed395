"""A second implementation of docs/protocol.md, from its words alone: the standard library and
`cryptography`, and nothing of silodp.

`python tests/core/protocol/second.py` writes the outputs in docs/vectors/*.json again from their
inputs; masks.json is made elsewhere.
"""

import hashlib
import json
import math
import struct
from fractions import Fraction
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

VECTORS = Path(__file__).parents[3] / "docs/vectors"
VERSIONS = 2, 3, 4

# --- section 1: frames ---------------------------------------------------------------------------


def frame(magic: str, body: bytes, private_key: str | None, version: int) -> bytes:
    signed = magic.encode() + bytes([version])
    key, signature = bytes(32), bytes(64)
    if private_key:
        own = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(private_key))
        key, signature = own.public_key().public_bytes_raw(), own.sign(signed + body)
    return signed + key + signature + struct.pack("<Q", len(body)) + body


def refusal(raw: bytes, magic: str, limit: int, *, unsigned: bool) -> str:
    """The code with which the bytes are refused, empty where the frame is sound."""
    if len(raw) > limit:
        return "size"
    if len(raw) < 109 or raw[:4] != magic.encode():
        return "malformed"
    if raw[4] not in VERSIONS:
        return "version"
    if struct.unpack("<Q", raw[101:109])[0] != len(raw) - 109:
        return "malformed"
    if raw[5:101] == bytes(96):
        return "" if unsigned else "signature"
    try:
        Ed25519PublicKey.from_public_bytes(raw[5:37]).verify(raw[37:101], raw[:5] + raw[109:])
    except (InvalidSignature, ValueError):
        return "signature"
    return ""


# --- section 2: bodies ---------------------------------------------------------------------------


def text(value: object) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def spelled(value: object) -> object:
    """Every number that is not whole as hexadecimal text; {"real": 2} is a number that happens to
    be whole.
    """
    if isinstance(value, dict):
        return (
            float(value["real"]).hex()
            if set(value) == {"real"}
            else {key: spelled(v) for key, v in value.items()}
        )
    if isinstance(value, list):
        return [spelled(v) for v in value]
    return value.hex() if isinstance(value, float) else value


def tensor(given: dict) -> tuple[str, list[int], bytes]:
    """(type, shape, bytes): numbers as little-endian floats, or bytes as they are."""
    if given["type"] == "U8":
        raw = bytes.fromhex(given["bytes"])
        return "U8", given.get("shape", [len(raw)]), raw
    letter = {"F32": "f", "F64": "d"}[given["type"]]
    return (
        given["type"],
        given["shape"],
        struct.pack(f"<{math.prod(given['shape'])}{letter}", *given["numbers"]),
    )


def body(fields: dict, tensors: dict[str, dict]) -> bytes:
    header: dict = {"__metadata__": {"silodp": text(spelled(fields))}}
    end, data = 0, b""
    for name in sorted(tensors):
        kind, shape, raw = tensor(tensors[name])
        header[name] = {"data_offsets": [end, end + len(raw)], "dtype": kind, "shape": shape}
        end, data = end + len(raw), data + raw
    head = text(header).encode("ascii")
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def message(given: dict) -> dict:
    """Sections 3 and 4: body, digest and frame of one message; "fields" in JSON alone, or with
    tensors.
    """
    made = (
        body(given["fields"], given["tensors"])
        if "tensors" in given
        else text(spelled(given["fields"])).encode("ascii")
    )
    out = {"body": made.hex(), "digest": hashlib.sha256(made).hexdigest()}
    if "round" in given["fields"]:
        everybody = given["fields"] | {"silo": "all", "query": "all"}
        out["round"] = hashlib.sha256(body(everybody, given["tensors"])).hexdigest()
    return out | {
        "frame": frame(given["magic"], made, given["private_key"], given["version"]).hex()
    }


# --- section 5: the release ----------------------------------------------------------------------


def lattice_step(clip: float, d: int) -> float:
    e, b = math.frexp(clip)[1], 0
    while 4**b < d:  # the smallest b with sqrt(d) <= 2^b
        b += 1
    return math.ldexp(1.0, e - 17 - b)


def whole(row: list[float], clip: float, gamma: float) -> list[int]:
    """One record's vector as integers, verified."""
    largest = max(abs(v) for v in row) if all(math.isfinite(v) for v in row) else 0.0
    if largest == 0:
        return [0] * len(row)
    room = clip / gamma * (1 - 2.0**-30) - math.sqrt(len(row)) / 2
    unit = [v / largest for v in row]
    length = max(1.0, math.hypot(*unit))
    k = [round(v * min(largest / gamma, room / length)) for v in unit]
    return k if sum(v * v for v in k) <= math.floor(Fraction(clip / gamma) ** 2) else [0] * len(row)


def release(given: dict) -> dict:
    """A Gaussian release of these vectors, one for each record of a full batch, with this noise;
    all but the noise is decided.
    """
    clip, z, rows = (
        given["clip"],
        given["noise_multiplier"],
        [[float(v) for v in row] for row in given["rows"]],
    )
    n, d = len(rows), len(rows[0])
    gamma = lattice_step(clip, d)
    k = [whole(row, clip, gamma) for row in rows]
    scale = math.nextafter(z * (2 * clip / gamma), math.inf)
    total = [
        sum(column) + noise
        for column, noise in zip(zip(*k, strict=True), given["noise"], strict=True)
    ]
    value = [gamma * t / n for t in total]
    most, width = 2 * clip / gamma * n + 12 * scale, 3
    while most * 64 > scale * 2.0 ** (8 * width - 1):
        width += 1
    unit = math.ldexp(gamma, max(0, math.ceil(math.log2(most / 2.0 ** (8 * width - 1))) + 1))
    top = 2 ** (8 * width - 1) - 1
    packed = [max(-top, min(top, round(v * (n / unit)))) for v in value]
    return {
        "step": gamma.hex(),
        "integers": k,
        "scale": scale.hex(),
        "value": [v.hex() for v in value],
        "unit": unit.hex(),
        "width": width,
        "packed": b"".join(p.to_bytes(width, "little", signed=True) for p in packed).hex(),
        "read": [(p * unit / n).hex() for p in packed],
    }


def share(given: dict) -> dict:
    """A silo's numbers in a total (section 7)."""
    clip = given["clip"]
    gamma = lattice_step(clip, len(given["rows"][0]))
    k = [whole(row, clip, gamma) for row in given["rows"]]
    scale = math.nextafter(given["noise_multiplier"] * (2 * clip / gamma), math.inf)
    coarse = 0
    while 2.0 ** (coarse + 1) <= scale / (64 * math.sqrt(given["counted"])):
        coarse += 1
    sums = [
        sum(column) + noise
        for column, noise in zip(zip(*k, strict=True), given["noise"], strict=True)
    ]
    if coarse:
        sums = [(number + 2 ** (coarse - 1)) // 2**coarse for number in sums]
    return {"integers": k, "step": (gamma * 2**coarse).hex(), "numbers": sums}


# --- section 6: the ledger's chain ---------------------------------------------------------------


def hashed(what: str, value: object) -> str:
    return hashlib.sha256(f"silodp ledger 1 {what}\n{text(value)}".encode()).hexdigest()


COLUMNS = (
    "sequence",
    "time",
    "act",
    "query_id",
    "digest",
    "run",
    "asker",
    "kind",
    "event",
    "bucket",
    "amount",
    "total",
    "previous",
)


def chain(given: dict) -> dict:
    """Genesis, and each entry's bucket, price, running total and hash, under the rule gdp."""
    head = genesis = hashed("genesis", given["settings"])
    buckets: dict[str, float] = {}
    generation, out = 0, []
    for sequence, entry in enumerate(given["entries"], 1):
        bucket, amount = "", 0.0
        if entry["act"] == "charge":
            sampling = entry["event"]["sampling"]
            if sampling["type"] == "DisjointBatches":
                bucket = f"{sampling['partition']}@{generation}/{sampling['batches']}/{sampling['index']}"  # noqa: E501
            event = entry["event"]
            z = float.fromhex(event["noise_multiplier"])
            amount = event["count"] / z**2
            if "counted" in event:  # what is paid for the distance vanishes in a float
                one = math.nextafter(1 / (event["counted"] * z**2) * (1 + 1e-15), math.inf)
                amount = event["count"] * one
            buckets[bucket] = buckets[bucket] + amount if bucket in buckets else amount
        elif entry["act"] == "records":
            generation = sequence
        worst: dict[str, float] = {}
        for name, spent in buckets.items():
            part = name.rsplit("/", 1)[0]
            worst[part] = max(worst.get(part, spent), spent)
        total = 0.0
        for spent in worst.values():  # since Python 3.12 `sum` rounds once, at the end
            total += spent
        made = {"bucket": bucket, "amount": amount.hex(), "total": total.hex()}
        row = entry | made | {"sequence": sequence, "event": text(entry["event"]), "previous": head}
        head = hashed("entry", [row[name] for name in COLUMNS])
        out.append(entry | made | {"hash": head})
    return {
        "genesis": genesis,
        "entries": out,
        "anchor": text({"ledger": given["settings"]["ledger"], "count": len(out), "head": head}),
    }


# --- section 7: totals ---------------------------------------------------------------------------


def opened(given: dict) -> dict:
    """What is in a shuffler's box: a sealed box is made by chance, so that the vector is its
    opening.
    """
    info = b"silodp shuffle 1 " + bytes.fromhex(given["round"])
    private_key = X25519PrivateKey.from_private_bytes(bytes.fromhex(given["shuffler_private_key"]))
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
    plain = suite.decrypt(bytes.fromhex(given["box"]), private_key, info)
    magic, round_, demanded, d = struct.unpack_from("<5s32sQQ", plain)
    end = 53 + 8 * d
    numbers = list(struct.unpack_from(f"<{d}q", plain, 53))
    Ed25519PublicKey.from_public_bytes(plain[end : end + 32]).verify(plain[end + 32 :], plain[:end])
    assert magic == b"SDPC\x02"
    assert round_.hex() == given["round"]
    assert len(plain) == end + 96
    return {
        "demanded": demanded,
        "numbers": numbers,
        "pseudonym": plain[end : end + 32].hex(),
    }


def relayed(given: dict) -> dict:
    """A shuffler's total, or its no."""
    if "code" in given:
        made = struct.pack("<B32s16s", 0, bytes.fromhex(given["request"]), given["code"].encode())
    else:
        sizes = (
            given["contributions"],
            len(given["totals"]),
            len(given["dropped"]),
        )
        made = struct.pack("<B32sQQQ", 1, bytes.fromhex(given["round"]), *sizes) + struct.pack(
            f"<{sizes[1]}q", *given["totals"]
        )
        made += b"".join(
            struct.pack("<32s16s", bytes.fromhex(k), code.encode())
            for k, code in sorted(given["dropped"].items())
        )
    return {"body": made.hex(), "frame": frame("SDPT", made, given["private_key"], 4).hex()}


def framed(given: dict) -> dict:
    if "code" in given:
        return {
            "code": refusal(
                bytes.fromhex(given["frame"]),
                given["magic"],
                given["limit"],
                unsigned=given["unsigned"],
            )
        }
    return {
        "frame": frame(
            given["magic"], bytes.fromhex(given["body"]), given["private_key"], given["version"]
        ).hex()
    }


MADE = {
    "frames": framed,
    "messages": message,
    "release": release,
    "totals": share,
    "ledger": chain,
    "boxes": opened,
    "relayed": relayed,
}
"""Which function makes the outputs of which file."""


def again(file: str, vector: dict) -> dict:
    return vector | MADE[file](vector)


if __name__ == "__main__":
    for file in MADE:
        path = VECTORS / f"{file}.json"
        known = json.loads(path.read_text())
        path.write_text(
            json.dumps(known | {"vectors": [again(file, v) for v in known["vectors"]]}, indent=1)
            + "\n"
        )
