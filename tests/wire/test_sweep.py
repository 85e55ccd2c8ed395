"""What lies about in circles is let go of by the bytes that were carried, however few objects they
are.
"""

import gc
import weakref

import pytest

from silodp.wire.sweep import PIECE, ROOM, Sweep


class Half:
    """One of two that name each other, as an engine's task and its future do."""

    def __init__(self, other=None):
        self.other, self.frame = other or Half(self), bytes(8)


@pytest.fixture
def unlooked():
    """Python does not look by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_circle_is_gone_once_so_many_bytes_were_carried_and_not_before(unlooked):
    sweep, left = Sweep(), weakref.ref(Half())
    sweep.carried(ROOM - PIECE - 1)
    assert left()
    sweep.carried(0)
    assert left() is None
    again = weakref.ref(Half())
    sweep.carried(ROOM - PIECE - 1)
    assert again()


def test_short_messages_count_by_the_buffer_that_the_engine_has_for_each(unlooked):
    sweep, left = Sweep(), weakref.ref(Half())
    for _ in range(ROOM // PIECE - 1):
        sweep.carried(0)
    assert left()
    sweep.carried(0)
    assert left() is None


def test_a_frame_that_is_longer_than_the_room_is_let_go_of_at_once(unlooked):
    sweep, left = Sweep(), weakref.ref(Half())
    sweep.carried(ROOM)
    assert left() is None
