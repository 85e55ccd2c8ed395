"""Frames with a common end: what goes in comes out, and the end is held once."""

from silodp.host.frames import Frames

FRAMES = {"a": b"1|same", "b": b"22|same", "c": b"333|same"}


def cut(frame: bytes) -> int:
    return frame.index(b"|") + 1


def test_frames_come_out_as_they_went_in_and_hold_a_common_end_once():
    frames = Frames.sharing(FRAMES.items(), cut)
    assert dict(frames) == FRAMES
    assert [frames.size(name) for name in frames] == [6, 7, 8]
    assert frames.end == b"same"
    assert len({id(frames.pieces(name)[1]) for name in frames}) == 1
    assert dict(frames.only(["c", "a"])) == {"c": FRAMES["c"], "a": FRAMES["a"]}


def test_frames_whose_ends_differ_are_whole_and_have_none_in_common():
    for other in (b"1|diff", b"1|longer", b"1|", b"1|xsame"):
        frames = Frames.sharing((FRAMES | {"b": other}).items(), cut)
        assert dict(frames) == FRAMES | {"b": other}
        assert frames.end == b""


def test_any_mapping_is_taken_as_it_is():
    frames = Frames.of(FRAMES)
    assert dict(frames) == FRAMES
    assert all(frames[name] is FRAMES[name] for name in FRAMES)
    assert Frames.of(frames) is frames
    assert (dict(Frames({})), Frames({}).end) == ({}, b"")
