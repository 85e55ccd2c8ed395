"""The gate in masked totals: what leaves is uniform without the others' answers, and no table
passes on which the price cannot count.
"""

import json
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.events import TotalEvent
from silodp.core.lattice import lattice_step, total_shift
from silodp.core.mechanisms import Masked, Shuffled
from silodp.core.privacy.accounting import GDP, gdp_epsilon
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.protocol import masks
from silodp.core.protocol.codec import REPLY, Envelope, Refusal, Sealed, decode_reply, encode_query
from silodp.core.protocol.offers import KeyRequest, Offer, decode_offer, encode_key_request
from silodp.core.protocol.quote import HoldRequest, decode_hold_reply, encode_hold
from silodp.core.query import Query
from silodp.core.sampling import FullBatch
from silodp.core.statistics import Grad
from silodp.silo.answer import exact
from silodp.silo.data.records import Records
from silodp.silo.ledger.durable import DurableLedger, Identity
from silodp.silo.service.door import Door, definition_hash
from silodp.silo.service.masking import RUNS, Masker, Masking
from silodp.silo.service.policy import SAMPLINGS, STATISTICS, Policy

SERVER, OTHER_SERVER, SILO = (
    Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 6, 2)
)
N, FEATURES = 40, 3
PROBLEM = Problem(nn.Sequential(nn.Linear(FEATURES, 2)), cross_entropy)
D = PROBLEM.dim
W = torch.linspace(-1, 1, D)[None]
POLICY = Policy(
    silo="hospital-a",
    epsilon=20.0,
    delta=1e-5,
    definition=definition_hash(PROBLEM),
    statistics=STATISTICS,
    samplings=SAMPLINGS,
    clip=(1e-6, 10.0),
    minimum_noise_multiplier=0.1,
    minimum_batch=4,
    maximum_local_steps=3,
    queries_per_run=1000,
    queries_per_hour=100_000,
    expires=date(9998, 1, 1),
    askers=tuple(key.public_key().public_bytes_raw().hex() for key in (SERVER, OTHER_SERVER)),
)
SHARE = 2.0
STEPS = 2 / lattice_step(1.0, D) / 2 ** total_shift(SHARE, 1.0, D, 3)
"""The sensitivity at a clip of 1, in steps of a total."""
RUN = "run-1"


class Other:
    """Another hospital of the cohort, whose numbers are zero; hostile where a test says so."""

    def __init__(self, number: int, records: int = 60, run: str = RUN) -> None:
        self.identity = Ed25519PrivateKey.from_private_bytes(bytes([100 + number]) * 32)
        self.key = X25519PrivateKey.from_private_bytes(bytes([150 + number]) * 32)
        self.row = masks.offered(
            self.identity, self.key, definition=POLICY.definition, run=run, epoch=bytes(16)
        )
        self.row = replace(self.row, records=records)
        self.member = f"other-{number} {self.row.identity.hex()}"

    def answer(self, envelope: Envelope) -> bytes:
        rows = masks.read_table(envelope.cohort)
        (mine,) = (row for row in rows if row.identity == self.row.identity)
        return masks.masked(
            np.zeros(D, np.int64),
            self.key,
            mine,
            rows,
            envelope.shuffle_round,
            envelope.query.mechanism.modulus,
        )


OTHERS = [Other(i) for i in range(3)]
MASKING = Masking(tuple(other.member for other in OTHERS), colluding=1, least=3, attempts=2)


class Silo:
    def __init__(self, folder, masking: Masking | None = MASKING) -> None:
        rng = np.random.default_rng(5)
        self.data = rng.normal(size=(N, FEATURES)).astype(np.float32), rng.integers(0, 2, N)
        self.folder, self.masking = folder, masking
        about = {
            "rule": GDP(),
            "budget": POLICY.budget,
            "records": N,
            "identity": Identity.of(*self.data),
        }
        self.ledger = DurableLedger.create(
            folder / "ledger.db", **about, registry=folder / "registry"
        )
        self.start()

    def start(self) -> None:
        """A new process: whatever was in memory alone is gone."""
        masker = Masker(self.masking, SILO, POLICY.definition) if self.masking else None
        records, registry = Records.of([self.data]), self.folder / "registry"
        self.door = Door(
            POLICY, PROBLEM, records, self.ledger, signing_key=SILO, trust=masker, registry=registry
        )

    def row(self, run: str = RUN, asker: Ed25519PrivateKey = SERVER) -> masks.Row:
        reply = self.door.handle(
            encode_key_request(KeyRequest(POLICY.silo, run, POLICY.definition), asker)
        )
        offer = decode_offer(reply, silo_key=SILO.public_key().public_bytes_raw().hex())
        assert isinstance(offer, Offer)
        return replace(offer.row, records=N)

    def ask(self, envelope: Envelope, asker: Ed25519PrivateKey = SERVER) -> Sealed | Refusal:
        return decode_reply(self.door.handle(encode_query(envelope, asker)), limit=10**6)  # type: ignore[return-value]

    def code(self, envelope: Envelope) -> str:
        got = self.ask(envelope)
        return got.code if isinstance(got, Refusal) else "answered"

    def charged(self) -> int:
        return sum(entry.act == "charge" for entry in self.ledger.entries())


@pytest.fixture
def silo(tmp_path):
    return Silo(tmp_path)


def asked(
    own: masks.Row,
    *,
    query_id="q1",
    others=OTHERS,
    round="0",
    attempt=0,
    run=RUN,
    rows=None,
    **changes,
) -> Envelope:
    noise = {"noise_multiplier": SHARE, "counted": 3, "modulus": 32}  # all but one of the four
    query = Query(Grad(W), Masked("anchor", 1.0, **noise | changes))
    table = masks.write_table([own, *(other.row for other in others)] if rows is None else rows)
    return Envelope(POLICY.silo, run, query_id, POLICY.definition, query, round, attempt, table)


# --- an answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("modulus", [32, 64])
def test_the_answers_of_a_whole_cohort_add_up_to_the_total(silo, modulus):
    envelope = asked(silo.row(), modulus=modulus)
    got = silo.ask(envelope)
    assert isinstance(got, Sealed)
    assert len(got.box) == D * modulus // 8
    total = masks.add_masked([got.box, *(other.answer(envelope) for other in OTHERS)], modulus)
    assert (abs(total) < N * STEPS / 2 + 6 * SHARE * STEPS).all()
    assert total.min() < 0 < total.max()
    assert not np.array_equal(np.frombuffer(got.box, masks.MODULI[modulus]).astype(int), total)


def test_an_answer_is_priced_without_who_may_collude_and_the_ledger_says_what_all_others_could_learn(  # noqa: E501
    silo,
):
    got = silo.ask(asked(silo.row()))
    assert isinstance(got, Sealed)
    (entry, _) = silo.ledger.entries()
    event = json.loads(entry.event)
    assert (event["counted"], event["noise_multiplier"]) == (3, SHARE.hex())
    assert silo.ledger.spent() == pytest.approx(gdp_epsilon(1 / (SHARE * 3**0.5), 1e-5), rel=1e-9)
    assert silo.ledger.local() == pytest.approx(gdp_epsilon(1 / SHARE, 1e-5), rel=1e-9)


def test_a_repeated_question_gets_the_same_bytes_and_no_second_charge_also_after_a_restart(silo):
    envelope = asked(silo.row())
    frame = encode_query(envelope, SERVER)
    first = silo.door.handle(frame)
    assert silo.door.handle(frame) == first
    silo.start()
    assert silo.door.handle(frame) == first
    assert silo.charged() == 1


def test_one_table_is_answered_once_whatever_the_query_id(silo, monkeypatch):
    own = silo.row()
    monkeypatch.setattr(
        exact.Exact, "answer", lambda *_: (_ for _ in ()).throw(OSError)
    )  # charged, and not answered: its key is kept
    assert silo.code(asked(own, query_id="q1")) == "internal"
    monkeypatch.undo()
    assert [silo.code(asked(own, query_id=name)) for name in ("q2", "q1", "q2")] == [
        "round",
        "answered",
        "epoch",
    ]
    assert silo.charged() == 1


def test_two_cohorts_of_a_round_get_fresh_noise_each_at_its_price(silo):
    """Never two tables over one draw: with the same numbers in both, the difference of two totals
    would be plain.
    """
    totals = []
    for i, some in enumerate([OTHERS, OTHERS[:2]]):
        envelope = asked(silo.row(), query_id=f"q{i}", others=some, attempt=i, counted=2)
        got = silo.ask(envelope)
        assert isinstance(got, Sealed)
        totals.append(masks.add_masked([got.box, *(other.answer(envelope) for other in some)], 32))
    assert silo.charged() == 2
    assert not np.array_equal(*totals)


# --- what is refused before any charge -----------------------------------------------------------


def hostile_tables(silo: Silo) -> dict[str, tuple[str, Envelope]]:
    own, stranger = silo.row(), Other(9)
    swapped = replace(OTHERS[0].row, key=stranger.row.key)
    twice = masks.offered(
        OTHERS[0].identity, stranger.key, definition=POLICY.definition, run=RUN, epoch=bytes(16)
    )
    elsewhere = Other(0, run="run-2").row
    pointless = replace(
        OTHERS[0].row, key=bytes(32)
    )  # of small order: with any key its secret is zero
    pointless = replace(
        pointless,
        signature=OTHERS[0].identity.sign(masks._statement(pointless, POLICY.definition, RUN)),
    )
    rows = [own, *(other.row for other in OTHERS)]
    return {
        "an invented silo": ("unpinned", asked(own, others=[*OTHERS[:2], stranger])),
        "a key swapped on the way": (
            "cohort",
            asked(own, rows=[own, swapped, *(o.row for o in OTHERS[1:])]),
        ),
        "a key that was signed for another run": (
            "cohort",
            asked(own, rows=[own, elsewhere, *(o.row for o in OTHERS[1:])]),
        ),
        "a key without a secret": (
            "cohort",
            asked(own, rows=[own, pointless, *(o.row for o in OTHERS[1:])]),
        ),
        "a silo twice under two keys": (
            "cohort",
            asked(own, rows=[*rows, replace(twice, records=60)]),
        ),
        "without this silo": ("cohort", asked(own, rows=rows[1:])),
        "too small a cohort": ("cohort", asked(own, others=OTHERS[:1], counted=1)),
        "more records of this silo than it has": (
            "cohort",
            asked(replace(own, records=own.records + 1)),
        ),
        "fewer records of this silo than it has": (
            "cohort",
            asked(replace(own, records=own.records - 1)),
        ),
        "noise of those who may collude": ("contributions", asked(own, counted=4)),
        "noise of a silo that is absent": (
            "contributions",
            asked(own, others=OTHERS[:2], counted=3),
        ),
        "a total that wraps around": (
            "modulus",
            asked(own, rows=[*rows[:-1], replace(rows[-1], records=2**33)]),
        ),
        "another modulus": ("modulus", asked(own, modulus=16)),
        "no noise": ("noise", asked(own, noise_multiplier=0.0)),
        "no noise that counts": ("noise", asked(own, counted=0)),
    }


def test_no_hostile_table_is_answered_or_charged(silo):
    found = {
        name: (silo.code(replace(envelope, query_id="q9")), wanted)
        for name, (wanted, envelope) in hostile_tables(silo).items()
    }
    assert {name: got for name, (got, _) in found.items()} == {
        name: wanted for name, (_, wanted) in found.items()
    }
    assert silo.charged() == 0
    assert silo.code(asked(silo.row())) == "answered"


def test_after_a_restart_unanswered_questions_of_the_old_epoch_are_refused_and_a_new_key_is_given(
    silo,
):
    own = silo.row()
    assert silo.row() == own
    silo.start()
    assert silo.code(asked(own)) == "epoch"
    silo.row()
    assert silo.code(asked(own)) == "epoch"
    assert silo.charged() == 0
    assert silo.code(asked(silo.row())) == "answered"
    assert silo.row() != own


def test_a_key_is_of_one_asker_and_one_run(silo):
    rows = {silo.row(), silo.row("run-2"), silo.row(asker=OTHER_SERVER)}
    assert len({row.key for row in rows}) == 3
    got = silo.ask(asked(silo.row()), OTHER_SERVER)
    assert isinstance(got, Refusal)
    assert got.code == "epoch"


def test_a_key_is_in_memory_alone_and_the_oldest_of_many_is_forgotten(silo):
    own = silo.row()
    (run,) = silo.door._trust._runs.values()
    kept = b"".join(path.read_bytes() for path in silo.folder.rglob("*") if path.is_file())
    assert run.key.private_bytes_raw() not in kept
    for i in range(RUNS):
        silo.row(f"more-{i}")
    assert silo.code(asked(own)) == "epoch"


def test_a_key_is_for_one_answer_and_gone_once_that_is_stored(silo):
    """Whoever looks into the process afterwards finds no key to what was sent, and no second
    question is answered under it; a retry still is.
    """
    own = silo.row()
    first = asked(own)
    reply = silo.ask(first)
    assert isinstance(reply, Sealed)
    (run,) = silo.door._trust._runs.values()
    assert (run.key, run.row) == (None, None)
    assert silo.code(asked(own, query_id="q2", round="1")) == "epoch"
    assert silo.charged() == 1
    assert silo.ask(first).box == reply.box  # type: ignore[union-attr]
    assert silo.row().key != own.key
    assert silo.code(asked(silo.row(), query_id="q2", round="1")) == "answered"


def test_a_round_is_asked_no_more_often_than_the_policy_says(silo):
    smaller = [OTHERS, OTHERS[:2], OTHERS[1:]]
    codes = [
        silo.code(asked(silo.row(), query_id=f"q{i}", others=some, attempt=i, counted=2))
        for i, some in enumerate(smaller)
    ]
    assert codes == ["answered", "answered", "attempts"]
    assert silo.charged() == 2
    assert silo.code(asked(silo.row(), query_id="q9", round="1")) == "answered"


def test_an_attempt_that_was_refused_at_no_price_is_not_one_of_those_that_the_policy_allows(
    silo, monkeypatch
):
    cohorts = [OTHERS, OTHERS[:2], OTHERS[1:]]

    def code(i: int) -> str:
        return silo.code(
            asked(silo.row(), query_id=f"q{i}", others=cohorts[i], attempt=i, counted=2)
        )

    monkeypatch.setattr(silo.door, "_policy", replace(POLICY, queries_per_hour=1))
    assert silo.code(asked(silo.row(), query_id="first", round="1")) == "answered"
    assert [code(i) for i in range(3)] == ["rate"] * 3
    monkeypatch.undo()
    assert [code(i) for i in (2, 0, 1)] == ["answered", "answered", "attempts"]
    assert silo.charged() == 3


def test_the_limit_on_what_all_others_learn_is_a_filter(tmp_path):
    silo = Silo(tmp_path, replace(MASKING, maximum_local_epsilon=1.0))
    assert silo.code(asked(silo.row())) == "local"
    assert silo.charged() == 0


def test_a_gate_without_a_table_gives_no_key_and_no_answer_and_one_with_it_answers_no_shuffle(
    tmp_path, silo
):
    (tmp_path / "none").mkdir()
    none = Silo(tmp_path / "none", None)
    reply = none.door.handle(
        encode_key_request(KeyRequest(POLICY.silo, RUN, POLICY.definition), SERVER)
    )
    assert decode_reply(reply, limit=10**5).code == "masks"  # type: ignore[union-attr]
    assert none.code(asked(silo.row())) == "masks"
    shuffled = Query(Grad(W), Shuffled("anchor", 1.0, SHARE, counted=2))
    assert (
        silo.code(Envelope(POLICY.silo, RUN, "q1", POLICY.definition, shuffled, "0")) == "shuffle"
    )


def test_a_key_is_given_to_listed_askers_for_this_silo_and_problem_alone(silo):
    stranger = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
    for request, key, wanted in (
        (KeyRequest(POLICY.silo, RUN, POLICY.definition), stranger, "asker"),
        (KeyRequest("another", RUN, POLICY.definition), SERVER, "silo"),
        (KeyRequest(POLICY.silo, RUN, "0" * 64), SERVER, "model"),
    ):
        assert (
            decode_reply(silo.door.handle(encode_key_request(request, key)), limit=10**5).code
            == wanted
        )  # type: ignore[union-attr]
    frame = bytearray(encode_key_request(KeyRequest(POLICY.silo, RUN, POLICY.definition), SERVER))
    frame[-3] ^= 1
    assert decode_reply(silo.door.handle(bytes(frame)), limit=10**5).code == "signature"  # type: ignore[union-attr]


def test_the_noise_is_drawn_anew_for_what_was_charged_but_not_stored(silo, monkeypatch):
    """An exception between charge and answer: nothing has left, and the same question is answered
    under the same charge.
    """
    envelope = asked(silo.row())
    monkeypatch.setattr(exact.Exact, "answer", lambda *_: (_ for _ in ()).throw(OSError))
    assert silo.code(envelope) == "internal"
    monkeypatch.undo()
    assert silo.code(envelope) == "answered"
    assert silo.charged() == 1


# --- the officer's table -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"members": ("other",)}, "members"),
        ({"members": (OTHERS[0].member, "again " + OTHERS[0].member.split()[1])}, "twice"),
        ({"least": 2}, "least is 2"),
        ({"colluding": -1}, "colluding"),
        ({"attempts": 0}, "attempts"),
        ({"maximum_local_epsilon": 0.0}, "maximum_local_epsilon"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_in_a_sentence(changes, words):
    with pytest.raises(BadInput, match=words):
        replace(MASKING, **changes)


def test_a_silo_is_no_other_of_itself():
    with pytest.raises(BadInput, match="own key"):
        Masker(
            replace(MASKING, members=(f"me {SILO.public_key().public_bytes_raw().hex()}",)),
            SILO,
            POLICY.definition,
        )


@pytest.mark.parametrize(("counted", "expected"), [(3, ""), (4, "contributions")])
def test_nothing_is_reserved_for_a_total_that_counts_on_more_noise_than_any_answer_may(
    silo, counted, expected
):
    """No question could use such a hold, whose price the asker would choose."""
    event = TotalEvent(FullBatch(), SHARE, 1, counted)
    request = HoldRequest(POLICY.silo, "run-1", "hold-1", POLICY.definition, 1, (("k", event),))
    raw = silo.door.handle(encode_hold(request, SERVER))
    if raw[:4] == REPLY:
        got = decode_reply(raw, limit=10**6)
        assert isinstance(got, Refusal)
        found = got.code
    else:
        found = decode_hold_reply(raw, silo_key=SILO.public_key().public_bytes_raw().hex()).code
    assert found == expected
