"""A hostile server and a hostile silo against real gates under masks: what each script gets, and
that it gets nothing else.

Three honest silos (policy, keys, Masker, Door, ledger in SQLite) have pinned each other and a
fourth, whose keys the attacker has, as it has the server's: `colluding` is 1. After each script
`got_nothing_else` looks at everything that left a gate: what is no whole total is uniform, whatever
is added up; every whole total is the honest silos' numbers under noise that was drawn for it alone,
charged by each, and priced by no more noise than they added. A second test takes the check out
that a script is made for, and must see the script go red. Keys and noise are the operating
system's: a false alarm in 100,000 runs of a script.
"""

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chisquare
from torch import nn

from mistakes import masked as mistakes
from silodp.core.lattice import lattice_step, total_shift
from silodp.core.mechanisms import Masked
from silodp.core.privacy.accounting import GDP, gdp_epsilon
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.protocol import masks
from silodp.core.protocol.codec import Envelope, Sealed, decode_reply, encode_query
from silodp.core.protocol.offers import KeyRequest, decode_offer, encode_key_request
from silodp.core.query import Query
from silodp.core.statistics import Grad
from silodp.silo.data.records import Records
from silodp.silo.ledger.durable import DurableLedger, Identity
from silodp.silo.service.door import Door, definition_hash
from silodp.silo.service.masking import Masker, Masking
from silodp.silo.service.policy import SAMPLINGS, STATISTICS, Policy

SERVER = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
FEATURES, SHARE = 24, 2.0
PROBLEM = Problem(nn.Sequential(nn.Linear(FEATURES, 2)), cross_entropy)
D, DEFINITION = PROBLEM.dim, definition_hash(PROBLEM)
DEVIATION = SHARE * 2 / lattice_step(1.0, D) / 2 ** total_shift(SHARE, 1.0, D, 3)
"""Of a share of noise, in steps of a total that counts on two or three shares."""
SIZES = {"a": 40, "b": 60, "c": 50}
HOSTILE = 80
"""Records that the hostile silo claims."""
KEYS = {
    name: Ed25519PrivateKey.from_private_bytes(bytes([10 + i]) * 32)
    for i, name in enumerate((*SIZES, "hostile"))
}
PINS = {name: f"{name} {key.public_key().public_bytes_raw().hex()}" for name, key in KEYS.items()}
EPSILON, DELTA = 8.0, 1e-5


class Victim:
    """A gate as it is deployed, of which the test can also see the numbers that it draws."""

    def __init__(self, name: str, folder, masker: type[Masker]) -> None:
        rng, n = np.random.default_rng(SIZES[name]), SIZES[name]
        self.name, self.n, self._folder, self._masker = name, n, folder / name, masker
        self._data = rng.normal(size=(n, FEATURES)).astype(np.float32), rng.integers(0, 2, n)
        self._folder.mkdir()
        self._policy = Policy(
            silo=name,
            epsilon=EPSILON,
            delta=DELTA,
            definition=DEFINITION,
            statistics=STATISTICS,
            samplings=SAMPLINGS,
            clip=(1e-6, 10.0),
            minimum_noise_multiplier=0.1,
            minimum_batch=4,
            maximum_local_steps=3,
            queries_per_run=1000,
            queries_per_hour=100_000,
            expires=date(9998, 1, 1),
            askers=(SERVER.public_key().public_bytes_raw().hex(),),
        )
        about = {
            "rule": GDP(),
            "budget": self._policy.budget,
            "identity": Identity.of(*self._data),
        }
        self.ledger = DurableLedger.create(
            self._folder / "ledger.db", **about, records=n, registry=self._folder / "registry"
        )
        self.drawn: list[np.ndarray] = []
        self.restart()

    def restart(self) -> None:
        """A new process: whatever was in memory alone is gone."""
        masking = Masking(
            tuple(pin for name, pin in PINS.items() if name != self.name),
            colluding=1,
            least=3,
            attempts=2,
        )
        masker = self._masker(masking, KEYS[self.name], DEFINITION)
        more = {
            "signing_key": KEYS[self.name],
            "trust": masker,
            "registry": self._folder / "registry",
        }
        self.door = Door(self._policy, PROBLEM, Records.of([self._data]), self.ledger, **more)
        answer = self.door._exact.answer
        self.door._exact.answer = lambda *asked: (
            self.drawn.append((got := answer(*asked)).flatten().numpy().astype(np.int64)) or got
        )  # type: ignore[method-assign]

    def charges(self) -> list[dict]:
        return [json.loads(entry.event) for entry in self.ledger.entries() if entry.act == "charge"]


class Attacker:
    """The server, and the silo whose keys it has."""

    def __init__(self, folder, masker: type[Masker] = Masker) -> None:
        self.victims = {name: Victim(name, folder, masker) for name in SIZES}
        self._secrets: dict[bytes, X25519PrivateKey] = {}
        self._asked, self._masker = 0, masker  # an attacker knows what is wrong with its victims
        self.answers: dict[bytes, tuple[Victim, Envelope, np.ndarray]] = {}
        """Everything that left a gate, by its bytes: who sent it, to what question, and the numbers
        that it drew for it.
        """

    # --- what it can ask -------------------------------------------------------------------------

    def key(self, name: str, run: str = "run") -> masks.Row:
        frame = encode_key_request(KeyRequest(name, run, DEFINITION), SERVER)
        row = decode_offer(
            self.victims[name].door.handle(frame),
            silo_key=KEYS[name].public_key().public_bytes_raw().hex(),
        ).row
        return replace(row, records=self.victims[name].n)

    def own(
        self, identity: str = "hostile", records: int = HOSTILE, key: bytes | None = None
    ) -> masks.Row:
        """A row of the hostile silo with a new key, or with one that is not its own; or of somebody
        whom nobody has pinned.
        """
        signer = KEYS.get(identity) or Ed25519PrivateKey.generate()
        secret = X25519PrivateKey.generate()
        row = masks.offered(signer, secret, definition=DEFINITION, run="run", epoch=bytes(16))
        if key is not None:
            row = replace(row, key=key)
            row = replace(row, signature=signer.sign(masks._statement(row, DEFINITION, "run")))
        else:
            self._secrets[row.key] = secret
        return replace(row, records=records)

    def question(
        self, rows, round: str, *, attempt: int = 0, silos: int | None = None, run: str = "run"
    ) -> Envelope:
        """As honest as the table lets it be: it counts on the noise of all but one, unless
        `silos` says more.
        """
        counted = len(rows) - 1 if silos is None else silos
        query = Query(
            Grad(torch.linspace(-1, 1, D)[None]),
            Masked("anchor", 1.0, SHARE, counted=counted, modulus=32),
        )
        return Envelope(
            "all", run, "all", DEFINITION, query, round, attempt, masks.write_table(rows)
        )

    def ask(self, name: str, question: Envelope, query_id: str | None = None) -> bytes | str:
        """The masked words, or the code of a refusal."""
        self._asked += 1
        envelope = replace(question, silo=name, query_id=query_id or f"q{self._asked}")
        victim = self.victims[name]
        reply = decode_reply(victim.door.handle(encode_query(envelope, SERVER)), limit=10**6)
        if not isinstance(reply, Sealed):
            return reply.code  # type: ignore[union-attr]
        self.answers.setdefault(reply.box, (victim, envelope, victim.drawn[-1]))
        return reply.box

    def total(self, names: str, round: str, attempt: int = 0) -> np.ndarray:
        """The sum of these silos' numbers, by the protocol; the hostile one's answer is in it, and
        its masks are off.
        """
        rows = [self.own(), *(self.key(name) for name in names)]
        question = self.question(rows, round, attempt=attempt)
        found = [self.ask(name, question) for name in names]
        assert all(isinstance(box, bytes) for box in found), found
        return np.sum([self.bare(box) for box in found], axis=0, dtype=np.uint32)  # type: ignore[arg-type]

    def bare(self, box: bytes) -> np.ndarray:
        """An answer without the masks that the attacker can take off: those of pairs with a key of
        its own.
        """
        victim, envelope, _ = self.answers[box]
        rows, words = masks.read_table(envelope.cohort), np.frombuffer(box, "<u4")
        (theirs,) = (
            row for row in rows if row.identity == KEYS[victim.name].public_key().public_bytes_raw()
        )
        digest = "0" * 64 if self._masker is mistakes.OneMask else envelope.shuffle_round
        for mine in (
            row for row in rows if row.key in self._secrets and self._masker is not mistakes.Bare
        ):
            key = masks.pair_key(
                masks.secret_with(self._secrets[mine.key], theirs), theirs, mine, digest
            )
            vector = masks.stream(key, D, 32)
            words = words - vector if theirs.identity < mine.identity else words + vector
        return words

    # --- what it has -----------------------------------------------------------------------------

    def got_nothing_else(self) -> None:
        """Raises AssertionError where more has left the gates than totals that are charged, under
        the noise that they are priced by.
        """
        rounds, hidden = defaultdict(dict), defaultdict(list)
        for box, (victim, envelope, _) in self.answers.items():
            assert victim.name not in rounds[envelope.shuffle_round], "one question has one answer"
            rounds[envelope.shuffle_round][victim.name] = box
        for boxes in rounds.values():
            envelope = self.answers[next(iter(boxes.values()))][1]
            rows = masks.read_table(envelope.cohort)
            honest = [row for row in rows if row.key not in self._secrets]
            for some in range(1, len(boxes) + 1):
                for part in itertools.combinations(boxes.values(), some):
                    seen = np.sum([self.bare(box) for box in part], axis=0, dtype=np.uint32)
                    if some < len(honest):
                        hidden[some].append(seen)
                        continue
                    plain = np.sum([self.answers[box][2] for box in part], axis=0)
                    assert np.array_equal(seen.view("<i4"), plain), (
                        "a whole total is that of the numbers"
                    )
                    assert sum(row.records for row in honest) == sum(
                        self.answers[box][0].n for box in part
                    ), "the table has the records that there are"
                    assert envelope.query.mechanism.counted <= len(part), (
                        "no noise is priced that honest silos did not add"
                    )
        for name, victim in self.victims.items():
            mine = [(box, drawn) for box, (who, _, drawn) in self.answers.items() if who is victim]
            assert len(victim.charges()) >= len(mine), f"{name} sent what it has not charged"
            assert victim.ledger.spent() <= EPSILON
            for (one, first), (other, second) in itertools.combinations(mine, 2):
                hidden["two answers"].append(self.bare(one) - self.bare(other))
                spread = (first - second).std() / (np.sqrt(2) * DEVIATION)
                assert 0.4 < spread < 1.6, (
                    "noise is drawn anew for every answer"
                )  # 50 numbers: 8 standard errors
        for what, words in hidden.items():
            assert uniform(words), f"sums of {what}, of which some mask is left, are not uniform"


def uniform(words: list[np.ndarray]) -> bool:
    """By the upper half of every byte, of which small numbers leave most at zero or one."""
    return (
        chisquare(
            np.bincount(np.frombuffer(np.concatenate(words).tobytes(), np.uint8) >> 4, minlength=16)
        ).pvalue
        > 1e-6
    )


def charged(attacker: Attacker) -> list[int]:
    return [len(victim.charges()) for victim in attacker.victims.values()]


# --- the scripts ---------------------------------------------------------------------------------


def splitting_cohorts(attacker: Attacker) -> None:
    """Overlapping cohorts of two and the hostile silo: three totals make an equation for each silo,
    under the noise of six draws, each paid.
    """
    own = attacker.own()
    rows = [own, attacker.key("a")]
    assert attacker.ask("a", attacker.question(rows, "alone", silos=1)) == "cohort", (
        "alone among the attacker's own"
    )
    ab, bc, ac = (
        attacker.total(pair, pair).view("<i4").astype(np.int64) for pair in ("ab", "bc", "ac")
    )
    assert charged(attacker) == [2, 2, 2]
    drawn = attacker.victims["a"].drawn[-2:]
    error = (ab + ac - bc) / 2 - np.mean(drawn, axis=0)  # what is left of b and c in the guess at a
    assert 0.4 < error.std() / DEVIATION < 1.6  # (2 + 2) / 4 of its square
    assert [event["counted"] for event in attacker.victims["a"].charges()] == [2, 2]


def two_tables_for_one_round(attacker: Attacker) -> None:
    """Each is shown another table: nothing cancels between them, whatever was charged."""
    rows = [attacker.own(), attacker.key("a"), attacker.key("b"), attacker.key("c")]
    larger = [replace(rows[0], records=2 * rows[0].records), *rows[1:]]
    found = [
        attacker.ask(name, attacker.question(table, "0"))
        for name, table in (("a", rows), ("b", larger), ("c", rows))
    ]
    everything = np.sum([attacker.bare(box) for box in found], axis=0, dtype=np.uint32)  # type: ignore[arg-type]
    assert uniform([everything]), "answers to two tables cancel"


def replaying(attacker: Attacker) -> None:
    """The same bytes come back, at no price, also after a restart; old keys and old questions get a
    refusal.
    """
    rows = [attacker.own(), *(attacker.key(name) for name in SIZES)]
    question = attacker.question(rows, "0")
    first = {name: attacker.ask(name, question, f"first-{name}") for name in SIZES}
    attacker.victims["a"].restart()
    assert {name: attacker.ask(name, question, f"first-{name}") for name in SIZES} == first
    assert {attacker.ask(name, question) for name in SIZES} == {"epoch"}, "under another id"
    late = attacker.question([attacker.own(), *(attacker.key(name) for name in SIZES)], "1")
    attacker.victims["b"].restart()
    assert attacker.ask("b", late) == "epoch", "a question of the process before"
    stale = [attacker.own(), attacker.key("a"), *rows[2:]]
    mixed = attacker.question(stale, "2")
    assert isinstance(attacker.ask("a", mixed), bytes), (
        "it cannot know that the others' keys are old"
    )
    assert [attacker.ask(name, mixed) for name in "bc"] == ["epoch", "epoch"]
    assert charged(attacker) == [2, 1, 1]


def swapping_keys(attacker: Attacker) -> None:
    """Keys that their silos have not signed for this run are refused before a charge; a key that
    the hostile silo has copied masks for nobody.
    """
    own, a, b, c = attacker.own(), *(attacker.key(name) for name in SIZES)
    other = attacker.key("b", "another-run")
    tables = {
        "a key of the server's own": [own, a, replace(b, key=attacker.own().key), c],
        "a key of another run": [own, a, other, c],
        "one key under two names": [attacker.own(key=b.key), a, b, c],
        "a key without a secret": [attacker.own(key=bytes(32)), a, b, c],
        "another key of the victim": [own, replace(a, key=attacker.own().key), b, c],
    }
    codes = {what: attacker.ask("a", attacker.question(rows, "0")) for what, rows in tables.items()}
    assert codes == dict.fromkeys(tables, "cohort")
    assert charged(attacker) == [0, 0, 0]
    copied = attacker.question([attacker.own(key=b.key), a, c], "1")
    assert all(isinstance(attacker.ask(name, copied), bytes) for name in "ac")


def inventing_silos(attacker: Attacker) -> None:
    """Silos that nobody has pinned, one twice, and noise that nobody adds, or only the hostile
    one.
    """
    own, a, b, c = attacker.own(), *(attacker.key(name) for name in SIZES)
    wanted = {
        "unpinned": ([attacker.own("nobody"), own, a, b, c], None),
        "unpinned, in the place of all others": (
            [attacker.own("nobody"), attacker.own("nobody"), a],
            None,
        ),
        "cohort": ([own, attacker.own(), a, b, c], None),
        "contributions": ([own, a, b, c], 4),
        "contributions, of who is absent": ([own, a, b], 3),
        "cohort, more than the victim has": (
            [own, replace(a, records=2 * a.records), b, c],
            None,
        ),
    }
    codes = {
        what: attacker.ask("a", attacker.question(rows, "0", silos=silos))
        for what, (rows, silos) in wanted.items()
    }
    assert codes == {what: what.partition(",")[0] for what in wanted}
    assert charged(attacker) == [0, 0, 0]
    attacker.total("abc", "1")
    assert [event["counted"] for event in attacker.victims["a"].charges()] == [3]


def dropping_selectively(attacker: Attacker) -> None:
    """The same round without one silo: the difference of two totals is that silo's numbers
    under two draws of everybody's noise, both paid.

    Once the policy's attempts are over the server takes other names, and gets what the budget
    holds.
    """
    whole, less = attacker.total("abc", "0"), attacker.total("ab", "0", attempt=1)
    left = (whole - less).view("<i4").astype(np.int64) - attacker.victims["c"].drawn[0]
    assert 0.4 < left.std() / (2 * DEVIATION) < 1.6, "the others' noise is not the same in both"
    again = [attacker.own(), *(attacker.key(name) for name in "abc")]
    assert [attacker.ask(name, attacker.question(again, "0", attempt=2)) for name in "ab"] == [
        "attempts"
    ] * 2
    asked = 0
    while (
        got := attacker.ask(
            "a",
            attacker.question([attacker.own(), attacker.key("a"), *again[2:]], f"other-{asked}"),
        )
    ) != "budget":
        assert isinstance(got, bytes), got
        asked += 1
    square = sum(1 / (event["counted"] * SHARE**2) for event in attacker.victims["a"].charges())
    spent = attacker.victims["a"].ledger.spent()
    assert 3 < asked + 2 == charged(attacker)[0]
    assert spent == pytest.approx(gdp_epsilon(square**0.5, DELTA), rel=1e-9)
    assert spent <= EPSILON


def one_draw_under_two_cohorts(attacker: Attacker) -> None:
    """A gate that dies between charge and answer, asked for another cohort: what it drew first
    never leaves.
    """
    a = attacker.victims["a"]
    rows = [attacker.own(), *(attacker.key(name) for name in SIZES)]
    whole, less = attacker.question(rows, "0"), attacker.question(rows[:3], "0", attempt=1)
    masked = a.door._trust.hide
    a.door._trust.hide = lambda *given: (_ for _ in ()).throw(OSError)  # type: ignore[method-assign]
    assert attacker.ask("a", whole, "q") == "internal"
    a.door._trust.hide = masked  # type: ignore[method-assign]
    assert (len(a.drawn), charged(attacker)) == (1, [1, 0, 0])
    assert attacker.ask("a", less, "q") == "id-reused"
    assert isinstance(attacker.ask("a", less, "q2"), bytes)
    assert attacker.ask("a", whole, "q") == "epoch", "the key has made its answer"
    assert attacker.ask("b", less) != attacker.ask("b", whole) == "epoch"
    assert len(a.drawn) == charged(attacker)[0] == 2


SCRIPTS = (
    splitting_cohorts,
    two_tables_for_one_round,
    replaying,
    swapping_keys,
    inventing_silos,
    dropping_selectively,
    one_draw_under_two_cohorts,
)


def attack(script, folder, masker: type[Masker] = Masker) -> None:
    attacker = Attacker(folder, masker)
    script(attacker)
    attacker.got_nothing_else()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_hostile_server_and_silo_get_refusals_stored_bytes_or_totals_at_their_price(
    script, folder
):
    attack(script, folder)


@pytest.mark.parametrize(
    ("script", "mistaken", "says"),
    [
        (splitting_cohorts, mistakes.AnyCohort, "alone among the attacker's own"),
        (
            splitting_cohorts,
            mistakes.Bare,
            "sums of 1, of which some mask is left, are not uniform",
        ),
        (two_tables_for_one_round, mistakes.OneMask, "answers to two tables cancel"),
        (replaying, mistakes.OldKeys, "under another id"),
        (replaying, mistakes.KeptKeys, "under another id"),
        (swapping_keys, mistakes.Unsigned, "a key of th"),
        (inventing_silos, mistakes.Anybody, "unpinned"),
        (inventing_silos, mistakes.TrustingAll, "contributions"),
        (inventing_silos, mistakes.AbsentNoise, "contributions"),
        (inventing_silos, mistakes.OwnRow, "cohort, more"),
        (dropping_selectively, mistakes.OneDraw, "the others' noise is not the same in both"),
        (dropping_selectively, mistakes.Tireless, "attempts"),
        (one_draw_under_two_cohorts, mistakes.KeptKeys, "the key has made its answer"),
    ],
)
def test_a_script_goes_red_without_the_check_that_it_is_made_for(script, mistaken, says, folder):
    with pytest.raises(AssertionError, match=says):
        attack(script, folder, mistaken)
