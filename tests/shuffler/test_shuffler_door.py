"""A shuffler behind its door against a server that may send what it likes, in any order and as
often as it likes.
"""

import contextlib
import random
import shutil
import sqlite3
import stat

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mixing import (
    DIMENSION,
    MEMBERS,
    OTHER,
    ROUND,
    SEAL,
    SERVER,
    SIGN,
    STRANGER,
    box,
    digest,
    door,
    frame,
    numbers_of,
    outcome,
    pool,
    request,
)
from silodp.core.errors import BadInput
from silodp.core.protocol import frames
from silodp.core.protocol.box import box_length
from silodp.core.protocol.relay import DECLINED, REQUEST, Declined, Passed, encode_outcome
from silodp.host.keys import public
from silodp.shuffler import store as store_module
from silodp.shuffler.daemon import line_of
from silodp.shuffler.store import RoundStore

KEYS = {"seal": public(SEAL), "sign": public(SIGN)}
GOOD = [box(i) for i in range(4)]


@pytest.fixture
def store(tmp_path) -> RoundStore:
    (tmp_path / "rounds.db").touch(0o600)
    return RoundStore.create(tmp_path / "rounds.db", **KEYS)


def code(raw: bytes) -> str:
    found = outcome(raw)
    assert isinstance(found, Declined)
    return found.code


# --- a round is passed on once -------------------------------------------------------------------


def test_once_a_round_is_passed_on_every_other_set_of_boxes_gets_the_same_bytes(store, tmp_path):
    first = door(store).handle(frame(*GOOD))
    others = [
        GOOD[:3],
        GOOD[1:],
        [*GOOD, box(4)],
        [box(0), *GOOD[1:]],
        GOOD[:1],
        [box(STRANGER)],
        [bytes(box_length(DIMENSION))],
    ]
    again = RoundStore(tmp_path / "rounds.db", **KEYS)
    for boxes in others:
        assert door(store).handle(frame(*boxes)) == door(again).handle(frame(*boxes)) == first
    passed = outcome(first)
    assert isinstance(passed, Passed)
    assert passed.totals.tolist() == np.sum([numbers_of(i) for i in range(4)], axis=0).tolist()


def test_of_two_that_add_up_a_round_at_once_the_first_to_store_it_decides(store):
    first, second = (
        encode_outcome(pool().total(request(*boxes)), SIGN) for boxes in (GOOD, GOOD[:3])
    )
    assert store.keep(ROUND, first, 1.0) == first
    assert store.keep(ROUND, second, 2.0) == store.reply(ROUND) == first


def test_a_round_that_was_declined_stays_open_for_more_boxes_and_its_refusal_is_bound_to_the_request(  # noqa: E501
    store,
):
    few = frame(*GOOD[:2])
    refusal = outcome(door(store).handle(few))
    assert isinstance(refusal, Declined)
    assert (refusal.code, refusal.digest) == ("too-few", digest(few))
    assert store.reply(ROUND) is None
    assert isinstance(outcome(door(store).handle(frame(*GOOD))), Passed)


def test_whatever_a_server_tries_it_gets_one_total_a_round_and_every_members_demand_holds(store):
    """Random subsets in random order with copies, second boxes, strangers and other rounds' boxes,
    at several doors: a hundred tries.
    """
    generator, seen, doors = random.Random(2), {}, [door(store) for _ in range(3)]
    rounds = [ROUND, OTHER, "ef" * 32]
    shelf = {r: [box(i, r) for i in (0, 1, 2, 3, 0, 1)] for r in rounds}
    for _ in range(100):
        round = generator.choice(rounds)
        boxes = generator.choices(
            [*shelf[round], *shelf[rounds[0]], box(STRANGER, round)],
            k=generator.randint(1, 6),
        )
        raw = generator.choice(doors).handle(frame(*boxes, round=round))
        if isinstance(found := outcome(raw), Passed):
            assert found.contributions >= 3
            assert seen.setdefault(round, raw) == raw
        else:
            assert found.code == "too-few"
            assert round not in seen
    assert len(seen) == 3


def test_fabricated_boxes_do_not_unmask_a_silo(store):
    """The server knows the numbers of its own boxes, and would have the silo's by subtraction."""
    mine = [Ed25519PrivateKey.generate() for _ in range(8)]
    zeros = [box(key, demanded=1, numbers=np.zeros(DIMENSION, int)) for key in mine]
    assert code(door(store).handle(frame(GOOD[0], *zeros))) == "too-few"
    passed = outcome(door(store).handle(frame(*GOOD[:3], *zeros)))
    assert isinstance(passed, Passed)
    assert passed.contributions == 3
    assert passed.dropped == {digest(b): "stranger" for b in zeros}


def test_boxes_of_another_round_do_not_fill_this_one_up(store):
    door(store).handle(frame(*(box(i, OTHER) for i in range(4)), round=OTHER))
    assert (
        code(door(store).handle(frame(GOOD[0], *(box(i, OTHER) for i in range(1, 4))))) == "too-few"
    )


def test_one_lying_member_counts_as_one_silo_whatever_it_sends(store):
    wanted = box(0, demanded=3)
    liar = [box(1, demanded=1), box(1, demanded=1, numbers=np.zeros(DIMENSION, int)), box(1)]
    assert code(door(store).handle(frame(wanted, *liar))) == "too-few"
    found = outcome(door(store).handle(frame(wanted, *liar, box(2, demanded=1))))
    assert isinstance(found, Passed)
    assert found.contributions == 3


# --- who asks, and how often ---------------------------------------------------------------------


def test_only_listed_servers_get_a_total_even_of_a_round_that_was_passed_on(store):
    door(store).handle(frame(*GOOD))
    for key in (STRANGER, MEMBERS[0], SIGN):
        assert code(door(store).handle(frame(*GOOD, key=key))) == "asker"


def test_no_more_totals_in_an_hour_than_the_settings_say_and_repeats_are_free(store):
    now = [1e9]
    desk = door(store, rounds_per_hour=2, clock=lambda: now[0])
    names = [f"{i:02x}" * 32 for i in range(4)]
    asked = [frame(*(box(i, name) for i in range(3)), round=name) for name in names]
    replies = [desk.handle(asked[0]), desk.handle(asked[1])]
    now[0] += 3599
    assert code(desk.handle(asked[2])) == "rate"
    assert [desk.handle(asked[0]), desk.handle(asked[1])] == replies
    now[0] += 2
    assert isinstance(outcome(desk.handle(asked[2])), Passed)
    now[0] -= 10**6  # a clock that goes back gives nothing away
    assert code(desk.handle(asked[3])) == "rate"


# --- any bytes -----------------------------------------------------------------------------------


def test_thousands_of_hostile_frames_get_signed_codes_and_pass_nothing_on(store):
    generator, good, notes = random.Random(3), frame(*GOOD[:2]), []
    desk = door(store, noted=notes.append)
    for k in range(2500):
        bad = bytearray(good)
        for _ in range(generator.randint(1, 4)):
            i, act = (
                generator.randrange(len(bad) if k % 2 else min(len(bad), 200)),
                generator.randrange(4),
            )
            if act == 0:
                bad[i] ^= 1 << generator.randrange(8)
            elif act == 1:
                del bad[i + 1 : i + generator.randint(1, 200)]
            elif act == 2:
                bad[i:i] = generator.randbytes(generator.randint(1, 40))
            else:
                bad = bytearray(generator.randbytes(generator.randint(1, 400)))
        raw = bytes(bad)
        if k % 3 == 0:  # with a good signature around it
            raw = frames.sign_frame(REQUEST, frames.VERSION, raw[frames.OVERHEAD :], SERVER)
        reply = outcome(desk.handle(raw))
        assert isinstance(reply, Declined)
        assert (reply.code in DECLINED, reply.digest) == (True, digest(raw))
    assert {note.code for note in notes} >= {"malformed", "signature", "too-few"}
    assert "internal" not in {note.code for note in notes}
    assert store.since(0) == 0


def test_a_frame_that_is_too_long_and_a_pool_that_fails_are_one_code(store, monkeypatch):
    assert code(door(store, limit=1000).handle(frame(*GOOD))) == "size"
    notes = []
    desk = door(store, noted=notes.append)
    monkeypatch.setattr(desk._pool, "total", lambda request: 1 / 0)
    assert code(desk.handle(frame(*GOOD))) == "internal"
    assert [line_of(note) for note in notes] == [f"internal   round {ROUND[:16]} boxes 4 dropped 0"]


# --- what is on disk -----------------------------------------------------------------------------


def spellings(numbers: np.ndarray) -> list[bytes]:
    """How a silo's numbers might lie on a disk: one by one or in a row, as bytes, digits or
    hexadecimal digits.
    """
    packed = [numbers.astype(kind).tobytes() for kind in ("<i8", ">i8", "<i4", ">i4", "<f8")]
    one = [numbers[:1].astype(kind).tobytes() for kind in ("<i8", ">i8", "<i4", ">i4", "<f8")]
    return [
        *packed,
        *one,
        *(str(n).encode() for n in numbers),
        *(b"%x" % n for n in numbers),
        *(row.hex().encode() for row in packed),
    ]


def test_no_count_of_a_silo_is_in_the_store_its_journal_the_log_or_the_reply(
    store, tmp_path, monkeypatch
):
    lines, kept = [], []
    connect = sqlite3.connect

    class Watched(sqlite3.Connection):
        def execute(self, sql, *rest):
            kept.extend(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
            return super().execute(sql, *rest)

    monkeypatch.setattr(
        store_module.sqlite3,
        "connect",
        lambda *args, **options: connect(*args, factory=Watched, **options),
    )
    desk = door(store, noted=lambda note: lines.append(line_of(note).encode()))
    boxes = [*GOOD, box(0), box(STRANGER), box(4, demanded=10**6)]
    replies = [
        desk.handle(frame(*GOOD[:2])),
        desk.handle(frame(*boxes)),
        desk.handle(frame(*GOOD[:3])),
    ]
    everything = b"\n".join(
        [
            *kept,
            *(path.read_bytes() for path in tmp_path.iterdir() if path.is_file()),
            *lines,
            *replies,
        ]
    )
    total = np.sum([numbers_of(i) for i in range(4)], axis=0)
    assert spellings(total)[0] in everything, "the search finds what is there"
    for numbers in [*(numbers_of(i) for i in range(5)), numbers_of(99)]:
        assert not [word for word in spellings(numbers) if word in everything]
    for name in (*map(public, MEMBERS), public(STRANGER)):
        assert name.encode() not in everything
        assert bytes.fromhex(name) not in everything
    assert [line.decode() for line in lines] == [
        f"too-few    round {ROUND[:16]} boxes 2 dropped too-few 2",
        f"passed     round {ROUND[:16]} boxes 7 dropped duplicate 1, stranger 1, too-few 1",
        f"repeated   round {ROUND[:16]} boxes 3 dropped 0",
    ]


def test_the_store_survives_a_power_cut_as_a_ledger_does_and_is_never_made_anew(store, tmp_path):
    path = tmp_path / "rounds.db"
    with contextlib.closing(store_module.connect(path)) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)  # EXTRA
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(BadInput, match="other keys"):
        RoundStore(path, seal=KEYS["sign"], sign=KEYS["sign"])
    whole = path.read_bytes()
    for content in (b"", b"x" * 5000, whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(BadInput, match="make another shuffler"):
            RoundStore(path, **KEYS)
    path.unlink()
    with pytest.raises(BadInput, match="make another shuffler"):
        RoundStore(path, **KEYS)
    assert code(door(store).handle(frame(*GOOD))) == "store"
    assert not path.exists()


def test_a_stored_reply_that_was_altered_or_moved_to_another_round_is_not_sent(store, tmp_path):
    desk, path = door(store), tmp_path / "rounds.db"
    desk.handle(frame(*GOOD))
    desk.handle(frame(*(box(i, OTHER) for i in range(4)), round=OTHER))
    shutil.copy(path, tmp_path / "copy")
    for other in (
        "zeroblob(200)",
        "'text'",
        "substr(reply, 2)",
        f"(SELECT reply FROM rounds WHERE round = x'{OTHER}')",
    ):
        path.write_bytes((tmp_path / "copy").read_bytes())
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE rounds SET reply = {other} WHERE round = x'{ROUND}'")
        assert code(desk.handle(frame(*GOOD[:3]))) == "store"


def test_a_disk_that_cannot_be_written_lets_no_total_out(store, tmp_path, monkeypatch):
    def full(*args, **options):
        raise sqlite3.OperationalError("database or disk is full")

    calls = iter([store_module.connect, store_module.connect, full])
    monkeypatch.setattr(
        store_module, "connect", lambda path, real=store_module.connect: next(calls, full)(path)
    )
    assert code(door(store).handle(frame(*GOOD))) == "store"


def test_the_pool_keeps_nothing_between_rounds():
    one = pool()
    before = {name: repr(value) for name, value in vars(one).items()}
    one.total(request(*GOOD))
    assert {name: repr(value) for name, value in vars(one).items()} == before
