"""A hostile server against real gate daemons over real sockets: questions that no policy allows,
and too many of those it does.

Tried elsewhere, and not again here: thousands of random frames (test_malicious_server), every
spelling of a frame (test_codec), garbage, 2^31 bytes, slow and many connections, kill -9 and a stop
in mid-work (test_daemon). A hostile courier is in test_hostile_courier.
"""

import io
import json
import math
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hostile import (
    PUBLIC,
    SECOND,
    STRANGER,
    asked,
    claiming,
    code,
    gate_of,
    hostile_gates,
    opened,
    point,
    running,
    unsigned,
)

from gates import ASKER, PATIENCE, Gate, Gates, wbcd
from silodp.core.protocol.codec import (
    OVERHEAD,
    QUERY,
    Answer,
    Refusal,
    _body,
    _split,
    encode_reply,
    sign_frame,
)
from silodp.core.protocol.frames import VERSION
from silodp.core.sampling import DisjointBatches, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, Histogram, LocalSteps, Moments, SteeredSteps
from silodp.silo.ledger.chain import event_of
from silodp.wire.socket import Socket, Unreached

pytestmark = pytest.mark.xdist_group("hostile-server")  # one set of daemons for all


@pytest.fixture(scope="module")
def gates() -> Iterator[Gates]:
    with hostile_gates() as made:
        yield made


@pytest.fixture(scope="module")
def poor() -> Iterator[Gate]:
    """A silo that has epsilon = 1 in all, for whatever the tests together ask it."""
    with tempfile.TemporaryDirectory(prefix="silodp-") as folder:
        gate = gate_of(Path(folder) / "poor", wbcd()[0])
        with running(gate):
            yield gate


# --- a hostile server: one question that no policy allows ----------------------------------------


def spelt(frame: bytes, field: str, value: object, inside: str = "") -> bytes:
    """The question with another word in a field, which no encoder of ours would write, under the
    listed server's signature.
    """
    fields, tensors = _split(frame[OVERHEAD:])
    (fields[inside] if inside else fields)[field] = value
    return sign_frame(QUERY, VERSION, _body(fields, tensors), ASKER)


class Shell:
    def __reduce__(self):
        return os.system, ("touch pickled",)


NOISES = {
    "no noise": 0.0,
    "negative noise": -30.0,
    "noise a bit below the minimum": math.nextafter(5.0, 0.0),
    "the smallest noise there is": 5e-324,
    "noise beyond the lattice": 1e300,
}
CLIPS = {
    "a huge clip": 1e300,
    "a clip a bit above the range": math.nextafter(10.0, 11.0),
    "a negative clip": -1.0,
    "a tiny clip": 1e-300,
}
BATCHES = {
    "batches of single records": DisjointBatches(150),
    "no batches": DisjointBatches(0),
    "minus one batch": DisjointBatches(-1),
    "a batch beyond the last": DisjointBatches(2, 2),
    "the batch before the first": DisjointBatches(2, -1),
}
STEPS = {
    "too many steps": (6, 0.1),
    "2^53 steps": (2**53, 0.1),
    "no step": (0, 0.1),
    "steps of no length": (2, 0.0),
    "steps back": (2, -1.0),
}
PATHS = [
    "../../silo.key",
    "/etc/passwd",
    "a\nanswered",
    "a\0b",
    "",
    "x" * 65,
    "C:\\x",
    "%2e%2e%2f",
    "~root",
    "\u202egnp",
]
ATTACKS = {
    **{name: ("noise", lambda c, z=z: asked(c, "q", noise=z)) for name, z in NOISES.items()},
    **{name: ("clip", lambda c, z=z: asked(c, "q", clip=z)) for name, z in CLIPS.items()},
    **{name: ("batch", lambda c, s=s: asked(c, "q", sampling=s)) for name, s in BATCHES.items()},
    **{
        name: ("steps", lambda c, s=s: asked(c, "q", LocalSteps(point(c), *s)))
        for name, s in STEPS.items()
    },
    **{
        f"noise {z}": (
            "malformed",
            lambda c, z=z: spelt(asked(c, "q"), "noise_multiplier", z, "mechanism"),
        )
        for z in ("nan", "inf", "-inf")
    },
    **{
        f"clip {z}": ("malformed", lambda c, z=z: spelt(asked(c, "q"), "clip", z, "mechanism"))
        for z in ("nan", "inf")
    },
    **{
        f"the id {p!r:.20}": ("malformed", lambda c, p=p: spelt(asked(c, "q"), "query", p))
        for p in PATHS
    },
    **{
        f"the run {p!r:.20}": ("malformed", lambda c, p=p: spelt(asked(c, "q"), "run", p))
        for p in PATHS
    },
    **{
        f"the partition {p!r:.20}": (
            "malformed",
            lambda c, p=p: spelt(
                asked(c, "q", sampling=DisjointBatches(2)), "partition", p, "sampling"
            ),
        )
        for p in PATHS
    },
    "a question of another silo": ("silo", lambda c: asked(c, "q", of="silo-1")),
    "another model": ("model", lambda c: asked(c, "q", model="0" * 64)),
    "steered steps, which are not allowed": (
        "statistic",
        lambda c: asked(c, "q", SteeredSteps(point(c), 2, 0.1, point(c))),
    ),
    "a histogram, which is not allowed": (
        "statistic",
        lambda c: asked(c, "q", Histogram(torch.zeros(1), len(c.features))),
    ),
    "moments, which are not allowed": (
        "statistic",
        lambda c: asked(c, "q", Moments(torch.zeros(30), torch.ones(30))),
    ),
    "a Poisson batch, which is not allowed": (
        "sampling",
        lambda c: asked(c, "q", sampling=Poisson(0.5)),
    ),
    "a random batch, which is not allowed": (
        "sampling",
        lambda c: asked(c, "q", sampling=WithoutReplacement(0.5)),
    ),
    "a point too short": ("shape", lambda c: asked(c, "q", Grad(point(c, extra=-1)))),
    "a point too long": ("shape", lambda c: asked(c, "q", Grad(point(c, extra=1)))),
    "a reference too short": (
        "shape",
        lambda c: asked(c, "q", GradDiff(point(c), point(c, extra=-1))),
    ),
    "a point that is NaN": ("not-finite", lambda c: asked(c, "q", Grad(point(c, math.nan)))),
    "a reference that is infinite": (
        "not-finite",
        lambda c: asked(c, "q", GradDiff(point(c), point(c, -math.inf))),
    ),
    "no signature": ("signature", lambda c: unsigned(asked(c, "q"))),
    "the signature of another question": (
        "signature",
        lambda c: asked(c, "p")[:101] + asked(c, "q")[101:],
    ),
    "the listed key over a stranger's signature": (
        "signature",
        lambda c: claiming(asked(c, "q", key=STRANGER), PUBLIC),
    ),
    "a stranger's key": ("asker", lambda c: asked(c, "q", key=STRANGER)),
    "a captured question under the courier's own key": (
        "asker",
        lambda c: sign_frame(QUERY, VERSION, asked(c, "q")[OVERHEAD:], STRANGER),
    ),
    "a reply in a question's place": (
        "malformed",
        lambda c: encode_reply(Refusal("budget"), ASKER),
    ),
    "a pickle that runs a command": ("malformed", lambda c: pickle.dumps(Shell())),
    "a signed pickle": (
        "malformed",
        lambda c: sign_frame(QUERY, VERSION, pickle.dumps(Shell()), ASKER),
    ),
    "a torch file": ("malformed", lambda c: sign_frame(QUERY, VERSION, _torch_file(), ASKER)),
    "two points more than any question has": ("size", lambda c: asked(c, "q") + bytes(10**5)),
}


def _torch_file() -> bytes:
    with io.BytesIO() as file:
        torch.save({"w": torch.zeros(3)}, file)
        return file.getvalue()


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_question_that_the_policy_does_not_allow_is_refused_and_leaves_no_trace_in_the_ledger(
    gates, attack
):
    wanted, frame = ATTACKS[attack]
    head = gates[0].ledger().head()
    assert code(gates[0], frame(gates[0].card)) == wanted
    assert gates[0].ledger().head() == head
    assert not list(gates[0].folder.rglob("pickled"))


def test_names_that_are_paths_in_disguise_name_no_file(gates):
    gate = gates[1]
    before = {path for path in gate.folder.rglob("*") if not path.name.startswith("ledger.db-")}
    assert (
        code(gate, asked(gate.card, "..", run="..", sampling=DisjointBatches(2, 0, "..")))
        == "answered"
    )
    assert (
        code(gate, asked(gate.card, "ledger.db", run="-rf", sampling=DisjointBatches(2, 0, ".")))
        == "answered"
    )
    assert {
        path for path in gate.folder.rglob("*") if not path.name.startswith("ledger.db-")
    } == before
    gate.ledger().verify()


def test_a_point_of_huge_numbers_gets_a_finite_answer_at_the_usual_price(gates):
    card, gate = gates[2].card, gates[2]
    for i, value in enumerate((1e308, -3e38, 1e-308)):
        reply = opened(
            card,
            Socket(gate.place.socket).ask(
                asked(card, f"huge-{i}", Grad(point(card, value, dtype=torch.float64))), PATIENCE
            ),
        )
        assert isinstance(reply, Answer)
        assert bool(torch.isfinite(reply.value).all())
        assert float(reply.value.norm()) < 100, "no larger than clip and noise make it"
    assert gate.charges("run")[-3:] == ["huge-0", "huge-1", "huge-2"]


# --- a hostile server: allowed questions, too many of them ---------------------------------------


def within_budget(gate: Gate) -> bool:
    """delta(epsilon) of a Gaussian at the mu that was charged, by the formula of PAPER-NOTES 3 and
    not by the package's own.
    """
    full, parts = 0.0, dict[tuple[str, str], float]()
    for entry in gate.ledger().entries():
        if entry.act == "charge":
            event = event_of(json.loads(entry.event))
            price = event.count / event.noise_multiplier**2
            name, _, index = entry.bucket.rpartition("/")
            if name:
                parts[name, index] = parts.get((name, index), 0.0) + price
            else:
                full += price
    worst = {
        name: max(price for (other, _), price in parts.items() if other == name)
        for name, _ in parts
    }
    mu, epsilon = math.sqrt(full + sum(worst.values())), gate.card.epsilon

    def phi(z: float) -> float:
        return math.erfc(-z / math.sqrt(2)) / 2

    return (
        phi(-epsilon / mu + mu / 2) - math.exp(epsilon) * phi(-epsilon / mu - mu / 2)
        <= gate.card.delta
    )


def test_a_question_beyond_the_whole_budget_is_refused_at_once(poor):
    head = poor.ledger().head()
    assert (
        code(poor, asked(poor.card, "all-at-once", LocalSteps(point(poor.card), 5, 0.1), noise=5.0))
        == "budget"
    )
    assert poor.ledger().head() == head


def test_many_parallel_questions_under_new_runs_and_partitions_never_pass_the_budget(poor):
    replies: dict[int, str] = {}

    def ask(i: int) -> None:
        sampling = DisjointBatches(2, i % 2, f"part-{i}") if i % 3 == 0 else None
        replies[i] = code(
            poor,
            asked(
                poor.card,
                f"race-{i}",
                noise=9.0,
                run=f"run-{i}",
                key=(ASKER, SECOND)[i % 2],
                sampling=sampling,
            ),
        )

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert set(replies.values()) == {"answered", "budget"}
    assert len(replies) == 24
    assert within_budget(poor)
    poor.ledger().verify()


def test_the_same_question_split_into_many_cheap_ones_under_new_names_has_one_budget(poor):
    codes = [
        code(poor, asked(poor.card, f"cheap-{i}", noise=50.0, run=f"cheap-run-{i}"))
        for i in range(40)
    ]
    while codes[-1] == "answered":
        codes.append(
            code(
                poor,
                asked(poor.card, f"cheap-{len(codes)}", noise=50.0, run=f"cheap-run-{len(codes)}"),
            )
        )
        assert len(codes) < 200
    assert set(codes[codes.index("budget") :]) == {"budget"}
    assert within_budget(poor)
    assert poor.ledger().left() < 0.1


def test_an_id_with_other_content_another_run_or_another_asker_gets_nothing_of_the_first_answer(
    poor, gates
):
    card, gate = gates[0].card, gates[0]
    frame = asked(card, "taken")
    raw = Socket(gate.place.socket).ask(frame, PATIENCE)
    head = gate.ledger().head()
    for other in (
        asked(card, "taken", noise=31.0),
        asked(card, "taken", clip=0.5),
        asked(card, "taken", Grad(point(card, 1.0))),
        asked(card, "taken", Grad(point(card, dtype=torch.float64))),
        asked(card, "taken", run="another"),
    ):
        assert code(gate, other) == "id-reused"
    assert gate.ledger().head() == head
    assert Socket(gate.place.socket).ask(frame, PATIENCE) == raw
    charged = [entry.query_id for entry in poor.ledger().entries() if entry.act == "charge"]
    if not charged:
        assert code(poor, asked(poor.card, "first")) == "answered"
        charged = ["first"]
    for key in (ASKER, SECOND):  # one of them did not ask it, and the content is another
        assert code(poor, asked(poor.card, charged[0], noise=33.0, key=key)) == "id-reused"


# --- two silos that differ in one record ---------------------------------------------------------

CANARY = 7654321.0


@pytest.fixture(scope="module")
def neighbours() -> Iterator[tuple[Gate, Gate]]:
    """They have one name and one key, few answers to give, and one record that is far from all
    others in the second.
    """
    (x, y), rates = wbcd()[1], {"queries_per_run": 2, "queries_per_hour": 4}
    other = x.copy()
    other[11] = CANARY
    with tempfile.TemporaryDirectory(prefix="silodp-") as name:
        first, second = (
            gate_of(Path(name) / folder, (records, y), **rates)
            for folder, records in (("a", x), ("b", other))
        )
        shutil.copy(first.place.key, second.place.key)
        second.card = replace(second.card, key=first.card.key)
        with running(first, second):
            yield first, second


def test_refusals_are_the_same_bytes_for_neighbours_and_answers_as_long_and_so_is_the_log(
    neighbours,
):
    card = neighbours[0].card
    flood = [frame(card) for _, frame in ATTACKS.values()]
    flood += [
        asked(card, f"n-{i}", noise=40.0, run=f"run-{i // 3}") for i in range(9)
    ]  # answered, run-limit, rate
    flood += [
        asked(card, "n-0", noise=40.0, run="run-0"),
        asked(card, "n-0", noise=41.0),
        asked(card, "n-9", noise=5.0, run="run-9"),
    ]
    seen = set()
    for frame in flood:
        raw, beside = (Socket(gate.place.socket).ask(frame, PATIENCE) for gate in neighbours)
        reply = opened(card, raw)
        if isinstance(reply, Refusal):
            assert raw == beside
        else:
            assert isinstance(opened(card, beside), Answer)
            assert len(raw) == len(beside)
            assert raw != beside
        seen.add(getattr(reply, "code", "answered"))
    assert {"answered", "run-limit", "rate", "id-reused", "noise", "asker", "size"} <= seen
    logs = [
        [line.split()[1:] for line in Path(gate.place.log).read_text().splitlines()]
        for gate in neighbours
    ]
    assert logs[0][1:] == logs[1][1:]  # after the line with the ledger's own start
    assert neighbours[0].card == neighbours[1].card, (
        "what a silo tells of itself does not depend on its records"
    )


def test_a_new_run_name_for_every_question_does_not_pass_the_hourly_rate(neighbours):
    gate = neighbours[0]
    codes = [
        code(gate, asked(gate.card, f"fast-{i}", noise=40.0, run=f"fast-{i}")) for i in range(6)
    ]
    assert codes[-2:] == ["rate", "rate"]
    charged = [entry.run for entry in gate.ledger().entries() if entry.act == "charge"]
    assert len(charged) == 4
    assert max(map(charged.count, charged)) <= 2


def test_a_stopped_gate_is_gone_and_one_whose_policy_has_expired_gives_nothing_not_even_what_it_gave(  # noqa: E501
    neighbours,
):
    gate = neighbours[1]
    given, frame = (
        asked(gate.card, "n-0", noise=40.0, run="run-0"),
        asked(gate.card, "late", noise=40.0, run="late"),
    )
    assert code(gate, given) == "answered"
    head = gate.ledger().head()
    assert gate.end() == 0
    with pytest.raises(Unreached, match="unreachable"):
        Socket(gate.place.socket).ask(frame, 1.0)
    policy = Path(gate.policy)
    lines = [
        "expires = 2020-01-01" if line.startswith("expires") else line
        for line in policy.read_text().splitlines()
    ]
    policy.write_text("\n".join(lines))
    gate.launch()
    gate.wait()
    assert code(gate, frame) == code(gate, given) == "expired"
    assert gate.ledger().head() == head
