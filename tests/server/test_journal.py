"""A run's journal: what was written is read again, a torn end is cut off, and nothing else is let pass."""

import multiprocessing

import pytest

from silodp.core.errors import BadInput
from silodp.server.journal import Journal, Round

ROUNDS = [
    Round(0, {"a": "1" * 64, "b": "2" * 64}, {"a": b"\0" * 300, "b": b""}, {}),
    Round(1, {"a": "3" * 64, "b": "4" * 64}, {"b": bytes(range(256))}, {"a": "silent"}),
    Round(2, {"b": "5" * 64}, {"b": b"x"}, {"a": "retired"}),
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
    more = Round(3, {"a": "6" * 64}, {"a": b"more"}, {})
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


def test_wherever_the_file_is_cut_whole_records_are_read_and_the_rest_is_written_anew(tmp_path):
    whole = written(tmp_path / "journal").read_bytes()
    ends = [len(written(tmp_path / f"first-{k}", ROUNDS[:k]).read_bytes()) for k in range(4)]
    assert ends[3] == len(whole)
    for cut in [*range(0, len(whole), 7), *ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:3])]:
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


def test_a_question_that_nobody_answered_is_asked_again_if_the_run_stopped_there_and_stands_if_it_was_killed_after_it(tmp_path):
    """One by one, silos may be absent and the run goes on: then later questions were asked after the empty record, and it must stand."""
    empty = Round(3, {"a": "6" * 64}, {}, {"a": "silent"})
    found, journal = read(written(tmp_path / "killed", [*ROUNDS, empty]))
    assert found == [*ROUNDS, empty]
    journal.stop(4)  # the iterate that began with question 4 was never made, question 3 was one of the iterate before
    journal.close()
    found, journal = read(tmp_path / "killed")
    assert found == [*ROUNDS, empty]
    journal.stop(3)
    journal.close()
    found, journal = read(tmp_path / "killed")
    assert found == ROUNDS
    after = Round(3, {"a": "6" * 64}, {"a": b"late"}, {})
    journal.write(after)
    journal.stop(3)
    journal.close()
    found, journal = read(tmp_path / "killed")
    assert found == [*ROUNDS, after], "what was answered is never asked again"
    journal.close()


def test_damage_before_the_end_is_refused_wherever_it_is(tmp_path):
    whole = written(tmp_path / "journal").read_bytes()
    ends = [len(written(tmp_path / f"first-{k}", ROUNDS[:k]).read_bytes()) for k in range(3)]
    lengths = {start + i for start in (0, *ends) for i in range(8)}
    for at in set(range(0, ends[2], 11)) - lengths:
        path = tmp_path / "damaged"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadInput, match=r"damaged|another run"):
            read(path)


def test_a_damaged_length_can_only_cut_the_journal_short(tmp_path):
    whole = written(tmp_path / "journal").read_bytes()
    start = len(written(tmp_path / "one", ROUNDS[:1]).read_bytes())
    (tmp_path / "journal").write_bytes(whole[:start] + b"\1" + whole[start + 1 :])
    found, journal = read(tmp_path / "journal")
    journal.close()
    assert found == ROUNDS[:1]


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
