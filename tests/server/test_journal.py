"""A run's journal: what was written is read again, a torn end is cut off, and nothing else is let
pass.
"""

import multiprocessing
import re

import numpy as np
import pytest

from silodp.core.errors import BadInput
from silodp.server.journal import Heard, Journal, Round
from silodp.server.replies import Key, Replies

HEARD = Heard("f" * 64, 3, "e" * 64, 1.25)
ROUNDS = [
    Round(0, {"a": "1" * 64, "b": "2" * 64}, {}, {"a": HEARD}, {"a": b"\0" * 300, "b": b""}),
    Round(
        1, {"a": "3" * 64, "b": "4" * 64}, {"a": "silent"}, {"b": HEARD}, {"b": bytes(range(256))}
    ),
    Round(
        2,
        {"b": "5" * 64},
        {"a": "retired"},
        {"b": HEARD},
        value=np.arange(60, dtype=np.float32).reshape(1, -1),
    ),
]


def written(path, rounds=ROUNDS, run="run", config="c" * 64):
    journal = Journal(path, run, config)
    assert journal.read() is None
    for told in rounds:
        journal.write(told)
    journal.close()
    return path


def read(path, run="run", config="c" * 64):
    journal = Journal(path, run, config)
    found = []
    while (told := journal.read()) is not None:
        found.append(told)
    return found, journal


def test_what_was_written_is_read_again_and_then_goes_on(tmp_path):
    path = written(tmp_path / "journal")
    found, journal = read(path)
    assert found == ROUNDS
    np.testing.assert_array_equal(found[2].value, ROUNDS[2].value)
    assert found[2].value.dtype == np.float32
    more = Round(3, {"a": "6" * 64}, {}, {"a": HEARD})
    journal.write(more)
    journal.close()
    found, journal = read(path)
    assert found == [*ROUNDS, more]
    journal.close()


def test_a_journal_is_not_written_before_it_is_read_to_its_end(tmp_path):
    journal = Journal(written(tmp_path / "journal"), "run", "c" * 64)
    assert journal.read() == ROUNDS[0]
    with pytest.raises(RuntimeError, match="to its end"):
        journal.write(ROUNDS[1])
    journal.close()


def test_wherever_the_file_is_cut_whole_records_are_read_and_the_rest_is_written_anew(
    tmp_path, quick
):
    whole = written(tmp_path / "journal").read_bytes()
    ends = [len(written(tmp_path / f"first-{k}", ROUNDS[:k]).read_bytes()) for k in range(4)]
    assert ends[3] == len(whole)
    for cut in [
        *range(0, len(whole), 7),
        *ends,
        *(end - 1 for end in ends),
        *(end + 1 for end in ends[:3]),
    ]:
        for tail in (b"", b"\0" * 40):
            path = tmp_path / f"cut-{cut}-{len(tail)}"
            path.write_bytes(whole[:cut] + tail)
            found, journal = read(path)
            kept = sum(end <= cut for end in ends[1:])
            assert found == ROUNDS[:kept], cut
            for told in ROUNDS[kept:]:
                journal.write(told)
            journal.close()
            assert path.read_bytes() == whole, cut
            path.unlink()


def test_a_question_that_nobody_answered_is_asked_again_if_the_run_stopped_there_and_stands_if_it_was_killed_after_it(  # noqa: E501
    tmp_path,
):
    """One by one, silos may be absent and the run goes on: then later questions were asked after
    the empty record, and it must stand.
    """
    empty = Round(3, {"a": "6" * 64}, {"a": "silent"})
    found, journal = read(written(tmp_path / "killed", [*ROUNDS, empty]))
    assert found == [*ROUNDS, empty]
    journal.stop(
        4
        # the iterate that began with question 4 was never made, question 3 was one of the iterate
        # before
    )
    journal.close()
    found, journal = read(tmp_path / "killed")
    assert found == [*ROUNDS, empty]
    journal.stop(3)
    journal.close()
    found, journal = read(tmp_path / "killed")
    assert found == ROUNDS
    after = Round(3, {"a": "6" * 64}, {}, {"a": HEARD})
    journal.write(after)
    journal.stop(3)
    journal.close()
    found, journal = read(tmp_path / "killed")
    assert found == [*ROUNDS, after], "what was answered is never asked again"
    journal.close()


@pytest.fixture
def quick(monkeypatch):
    """A disk that is waited for nowhere: what is tested is what the file holds."""
    monkeypatch.setattr("os.fsync", lambda file: None)


def put(path, at: int, byte: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(byte)


def test_wherever_a_bit_is_flipped_the_journal_is_refused_in_a_sentence_or_only_its_last_record_is_made_again(  # noqa: E501
    tmp_path, quick
):
    """What the last record says can be made of the replies beside it; all that stands before others
    cannot, lengths included.
    """
    whole = written(tmp_path / "journal").read_bytes()
    last, path, refused = (
        len(written(tmp_path / "first", ROUNDS[:2]).read_bytes()),
        tmp_path / "bent",
        {},
    )
    path.write_bytes(whole)
    for at in range(len(whole)):
        bent = bytes([whole[at] ^ 1 << at % 8])
        put(path, at, bent)
        try:
            found, journal = read(path)
        except BadInput as error:
            refused[at] = str(error)
            assert path.read_bytes()[at] == bent[0], "what is refused is left as it is"
            put(path, at, whole[at : at + 1])
            continue
        assert found == ROUNDS[:2], at
        assert at >= last, at
        journal.write(ROUNDS[2])
        journal.close()
        assert path.read_bytes() == whole
    assert refused.keys() >= set(range(last))
    assert all(
        re.fullmatch(rf"the journal {path} is damaged at byte \d+; restore it from a copy", said)
        for said in refused.values()
    )


def test_a_length_that_was_damaged_to_end_where_the_file_ends_is_no_torn_record(tmp_path):
    path = written(tmp_path / "journal")
    start, whole = len(written(tmp_path / "one", ROUNDS[:1]).read_bytes()), path.read_bytes()
    path.write_bytes(
        whole[:start] + (len(whole) - start - 40).to_bytes(8, "big") + whole[start + 8 :]
    )
    with pytest.raises(BadInput, match=f"damaged at byte {start}"):
        read(path)


@pytest.mark.parametrize("other", [{"run": "other"}, {"config": "d" * 64}])
def test_another_runs_or_another_orders_journal_is_refused(tmp_path, other):
    path = written(tmp_path / "journal")
    before = path.read_bytes()
    with pytest.raises(BadInput, match="another run or to other settings"):
        read(path, **other)
    assert path.read_bytes() == before


def _try(path, answer):
    try:
        Journal(path, "run", "c" * 64)
    except BadInput as error:
        answer.put(str(error))
    else:
        answer.put("opened")


def test_one_process_at_a_time(tmp_path):
    _, journal = read(written(tmp_path / "journal"))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    for wanted in ("another process runs", "opened"):
        other = context.Process(target=_try, args=(tmp_path / "journal", answers))
        other.start()
        assert wanted in answers.get(timeout=600)
        other.join(600)
        journal.close()


# --- iterates, and the replies that they are made of ---------------------------------------------


KEYS = [Key(0, "a", "1" * 64), Key(0, "b", "2" * 64), Key(1, "a", "3" * 64)]


def test_replies_stay_until_their_iterate_is_on_the_disk_and_an_iterate_is_compared_when_it_is_made_again(  # noqa: E501
    tmp_path,
):
    journal = Journal(tmp_path / "journal", "run", "c" * 64)
    journal.read()
    journal.replies.keep(KEYS[0], b"reply")
    journal.write(ROUNDS[0])
    journal.close()
    journal = Journal(tmp_path / "journal", "run", "c" * 64)
    assert journal.replies.get(KEYS[0]) == b"reply", "killed after the mean, before the iterate"
    assert journal.read() == ROUNDS[0]
    journal.iterate(1, "a" * 64)
    assert KEYS[0] not in journal.replies
    assert (tmp_path / "replies").stat().st_size == 0
    journal.close()
    journal = Journal(tmp_path / "journal", "run", "c" * 64)
    journal.read()
    with pytest.raises(BadInput, match="iterate 1 is not the one in the journal"):
        journal.iterate(1, "b" * 64)
    journal.close()
    found, journal = read(tmp_path / "journal")
    assert found == ROUNDS[:1]
    journal.close()


def test_wherever_the_file_of_replies_is_cut_or_bent_whole_ones_before_it_are_kept_and_the_rest_is_asked_for_again(  # noqa: E501
    tmp_path,
):
    path, frames = tmp_path / "replies", [b"x" * 90, b"", bytes(range(200))]
    kept, ends = Replies(path), []
    for key, frame in zip(KEYS, frames, strict=True):
        kept.keep(key, frame)
        ends.append(path.stat().st_size)
    kept.close()
    whole = path.read_bytes()
    for cut in range(0, len(whole), 5):
        for content in (whole[:cut], whole[:cut] + bytes([whole[cut] ^ 1]) + whole[cut + 1 :]):
            path.write_bytes(content)
            found = Replies(path)
            there = [key for key in KEYS if key in found]
            assert there == KEYS[: sum(end <= cut for end in ends)], cut
            assert [found.get(key) for key in there] == frames[: len(there)]
            for key, frame in zip(KEYS, frames, strict=True):
                found.keep(key, frame)
            found.close()
            assert path.read_bytes() == whole
