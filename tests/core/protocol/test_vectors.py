"""The published bytes of docs/protocol.md: made once by an implementation that knows nothing of
silodp (`second`), and once by silodp.
"""

import ast
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import nn

from silodp.core.errors import Refused
from silodp.core.lattice import lattice_step, noise_scale
from silodp.core.mechanisms import MECHANISMS, Shuffled
from silodp.core.problem.problem import Problem
from silodp.core.protocol import codec, frames, offers, quote, relay
from silodp.core.protocol.box import open_box
from silodp.core.protocol.packing import Packing
from silodp.core.query import Query
from silodp.core.sampling import SAMPLINGS
from silodp.core.statistics import STATISTICS, Grad
from silodp.silo.answer import lattice
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import quantised
from silodp.silo.data.records import Records
from silodp.silo.ledger.chain import COLUMNS, Altered, Entry, LedgerSettings, canonical
from silodp.silo.ledger.state import LedgerState

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PAGE = (ROOT / "docs/protocol.md").read_text()


def _second():
    found = importlib.util.spec_from_file_location("second_implementation", HERE / "second.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


second = _second()
VECTORS = {
    file: json.loads((ROOT / f"docs/vectors/{file}.json").read_text())["vectors"]
    for file in second.MADE
}


def of(*files):
    return [
        pytest.param(file, vector, id=f"{file}: {vector['name']}")
        for file in files
        for vector in VECTORS[file]
    ]


def private(key):
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key)) if key else None


def public(key):
    return private(key).public_key().public_bytes_raw().hex()


# --- from the words of the page ------------------------------------------------------------------


def test_the_second_implementation_imports_nothing_but_the_standard_library_and_cryptography():
    tree = ast.parse((HERE / "second.py").read_text())
    named = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    named |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in named} <= sys.stdlib_module_names | {"cryptography"}


@pytest.mark.parametrize(("file", "vector"), of(*second.MADE))
def test_the_second_implementation_makes_the_published_bytes(file, vector):
    assert second.again(file, vector) == vector


@pytest.mark.parametrize("file", [*second.MADE, "masks"])
def test_the_page_names_every_file_of_vectors_and_every_file_is_checked(file):
    assert f"vectors/{file}.json" in PAGE
    assert {path.stem for path in (ROOT / "docs/vectors").glob("*.json")} == {*second.MADE, "masks"}


@pytest.mark.parametrize(
    "kind",
    [*STATISTICS.values(), *SAMPLINGS.values(), *MECHANISMS.values()],
    ids=lambda kind: kind.__name__,
)
def test_the_page_has_every_kind_of_question_with_its_fields(kind):
    """A row `| Name | field kind, ... |` of a table."""
    wanted = ", ".join(f"`{field}` {what}" for field, what in kind.wire.items()) or "none"
    assert f"| `{kind.__name__}` | {wanted} |" in PAGE


def test_the_page_has_the_version_and_every_magic_of_the_code():
    assert second.VERSIONS == frames.SPOKEN
    assert f"Versions {frames.COMMON} and {frames.VERSION}" in PAGE
    for magic in (
        codec.QUERY,
        codec.REPLY,
        quote.HOLD,
        quote.HELD,
        offers.KEYS,
        offers.OFFER,
        relay.REQUEST,
        relay.OUTCOME,
    ):
        assert f"`{magic.decode()}`" in PAGE


# --- by silodp -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "vector"), of("frames"))
def test_silodp_makes_and_refuses_the_same_frames(file, vector):
    if "code" not in vector:
        made = frames.sign_frame(
            vector["magic"].encode(),
            vector["version"],
            bytes.fromhex(vector["body"]),
            private(vector["private_key"]),
        )
        assert made.hex() == vector["frame"]
        return
    read = frames.open_frame if vector["unsigned"] else frames.open_signed
    try:
        read(bytes.fromhex(vector["frame"]), vector["magic"].encode(), vector["limit"])
        code = ""
    except Refused as refused:
        code = refused.code
    assert code == vector["code"]


@pytest.mark.parametrize(("file", "vector"), of("messages"))
def test_silodp_reads_every_message_and_writes_the_same_bytes(file, vector):
    frame, key, limit = bytes.fromhex(vector["frame"]), private(vector["private_key"]), 10**5
    fields = vector["fields"]
    match vector["magic"]:
        case "SDPQ":
            read, asker, digest = codec.decode_query(frame, limit=limit)
            assert codec.encode_query(read, key) == frame
            assert (asker, digest, read.query_id) == (
                public(vector["private_key"]),
                vector["digest"],
                fields["query"],
            )
            assert type(read.query.statistic).__name__ == fields["statistic"]["name"]
            assert float(read.query.mechanism.clip) == fields["mechanism"]["clip"]["real"]
            assert "round" not in vector or read.shuffle_round == vector["round"]
        case "SDPR":
            read = codec.decode_reply(
                frame, limit=limit, silo_key=public(vector["private_key"]) if key else None
            )
            assert codec.encode_reply(read, key) == frame
            if "packed" in fields:  # 1, -2 and 123456 units of 2^-18, over 40
                assert read.value.tolist() == [
                    [2**-18 / 40, -2 * 2**-18 / 40, 123456 * 2**-18 / 40]
                ]
        case "SDPH":
            read, asker, digest = quote.decode_hold(frame)
            assert quote.encode_hold(read, key) == frame
            assert (asker, digest, read.number) == (
                public(vector["private_key"]),
                vector["digest"],
                fields["number"],
            )
        case "SDPK":
            read = quote.decode_hold_reply(frame, silo_key=public(vector["private_key"]))
            assert quote.encode_hold_reply(read, key) == frame
        case "SDPM":
            read, asker, digest = offers.decode_key_request(frame)
            assert offers.encode_key_request(read, key) == frame
            assert digest == vector["digest"]
        case "SDPO":
            read = offers.decode_offer(frame, silo_key=public(vector["private_key"]))
            assert offers.encode_offer(read, key) == frame
        case other:
            pytest.fail(f"nobody reads {other}")


@pytest.mark.parametrize(("file", "vector"), of("release"))
def test_silodp_rounds_sums_and_packs_the_same_release(file, vector):
    rows = torch.tensor([[float(v) for v in row] for row in vector["rows"]], dtype=torch.float64)
    (n, d), clip = rows.shape, vector["clip"]
    gamma = lattice_step(clip, d)
    assert gamma.hex() == vector["step"]
    integers = quantised(rows, clip, gamma)
    assert integers.tolist() == vector["integers"]
    scale = noise_scale(vector["noise_multiplier"], clip, gamma)
    assert scale.hex() == vector["scale"]
    value = gamma * (integers.sum(0).numpy() + np.array(vector["noise"])).astype(np.float64) / n
    assert [v.hex() for v in value.tolist()] == vector["value"]
    packing = Packing.of(gamma, n, 2 * clip / gamma * n + 12 * scale, scale)
    assert (packing.unit.hex(), packing.width) == (vector["unit"], vector["width"])
    packed = packing.packed(value)
    assert packed.tobytes().hex() == vector["packed"]
    assert [v.hex() for v in packing.unpacked(packed).tolist()] == vector["read"]


@pytest.mark.parametrize(("file", "vector"), of("totals"))
def test_silodp_gives_the_same_numbers_to_a_total(file, vector, monkeypatch):
    rows = torch.tensor([[float(v) for v in row] for row in vector["rows"]], dtype=torch.float64)
    n, d = rows.shape
    clip = vector["clip"]
    mechanism = Shuffled("a", clip, vector["noise_multiplier"], counted=vector["counted"])
    assert float(mechanism.steps(d)).hex() == vector["step"]
    monkeypatch.setattr(lattice, "rounded_gaussian", lambda *_: np.array(vector["noise"]))
    problem = Problem(nn.Linear(d, 1, bias=False), lambda output, y: output.sum(1))
    records = Records.of([(rows.numpy(), np.zeros(n))])
    asked = Exact(problem, records, partition=lambda name, batches: np.arange(n))
    answer = asked.answer(Query(Grad(torch.zeros(1, d, dtype=torch.float64)), mechanism), [0])
    assert answer.flatten().tolist() == vector["numbers"]


@pytest.mark.parametrize(("file", "vector"), of("ledger"))
def test_silodp_chains_prices_and_adds_up_the_same_ledger(file, vector):
    settings = LedgerSettings.of(vector["settings"])
    assert settings.genesis == vector["genesis"]
    state, previous = LedgerState(settings), settings.genesis
    for sequence, given in enumerate(vector["entries"], 1):
        row = given | {
            "sequence": sequence,
            "event": canonical(given["event"]),
            "previous": previous,
        }
        entry = Entry.of([row[name] for name in COLUMNS])
        state.apply(entry)
        with pytest.raises(Altered):
            Entry.of([(row | {"run": "another"})[name] for name in COLUMNS])
        previous = entry.hash
    state.check_total()
    assert (
        canonical({"ledger": settings.ledger, "count": state.sequence, "head": state.head})
        == vector["anchor"]
    )


@pytest.mark.parametrize(("file", "vector"), of("boxes"))
def test_silodp_opens_the_same_box(file, vector):
    key = X25519PrivateKey.from_private_bytes(bytes.fromhex(vector["shuffler_private_key"]))
    found, pseudonym = open_box(bytes.fromhex(vector["box"]), vector["round"], key)
    read = dataclasses.asdict(found) | {"numbers": found.numbers.tolist(), "pseudonym": pseudonym}
    assert read == {name: vector[name] for name in read}


@pytest.mark.parametrize(("file", "vector"), of("relayed"))
def test_silodp_reads_and_writes_the_same_outcome_of_a_shuffler(file, vector):
    frame = bytes.fromhex(vector["frame"])
    read = relay.decode_outcome(frame, limit=10**4, shuffler_key=public(vector["private_key"]))
    assert relay.encode_outcome(read, private(vector["private_key"])) == frame
