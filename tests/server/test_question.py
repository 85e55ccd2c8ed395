"""The states of a question to a silo: the table is whole, and what it says is charged is shown as
spent.
"""

import contextlib
import itertools
from dataclasses import replace

import pytest
from test_remote import Local, Silo, clock, gradient, three  # noqa: F401

from gates import ASKER
from silodp.core.protocol.codec import Refusal
from silodp.server import question as machine
from silodp.server.order import Order
from silodp.server.progress import Progress
from silodp.server.question import (
    MAY_BE_CHARGED,
    OPEN,
    TRANSITIONS,
    ImpossibleEvent,
    Question,
    QuestionEvent,
    QuestionState,
    event_of,
    next_state,
)
from silodp.server.remote import Remote, Timeouts
from silodp.server.run import plan_order
from silodp.server.spending import Spending

State = QuestionState
WAITS = Timeouts(deadline=5.0, limit=5.0, retry=1.0)


# --- the table -----------------------------------------------------------------------------------


def test_every_state_can_be_reached_and_every_event_happens_somewhere():
    reached = {State.NEW}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in reached}:
        if more <= reached:
            break
        reached |= more
    assert reached == set(State)
    assert {event for _, event in TRANSITIONS} == set(QuestionEvent)


@pytest.mark.parametrize("state", State)
def test_an_event_that_the_table_lacks_raises(state):
    for event in QuestionEvent:
        if (state, event) in TRANSITIONS:
            assert next_state(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(ImpossibleEvent, match=f"{event.name} .* {state.name}"):
                next_state(state, event)


def test_open_states_lead_on_and_final_states_do_not():
    assert {before for before, _ in TRANSITIONS} == OPEN


def test_from_the_first_frame_on_only_a_refusal_of_that_frame_shows_that_nothing_was_charged():
    """Walk every sequence of four events from each state that follows a frame."""
    assert set(State) - MAY_BE_CHARGED == {State.NEW, State.UNASKED, State.REFUSED}
    for events in itertools.product(QuestionEvent, repeat=4):
        state = State.SENT
        for event in events:
            if (state, event) not in TRANSITIONS:
                break
            first = state is State.SENT and event is QuestionEvent.REFUSED
            state = TRANSITIONS[state, event]
            assert (state in MAY_BE_CHARGED) is not first


@pytest.mark.parametrize("code", ["budget", "clip", "a code of a later version"])
def test_a_code_that_no_row_names_is_a_refusal_for_good(code):
    assert event_of(code) is QuestionEvent.REFUSED


CODES = ("busy", "forged", "value", "purged", "removed", "clip", "silent", "retired")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("late", [False, True])
def test_a_question_of_the_journal_has_the_states_that_it_had_when_it_was_asked(code, late):
    asked = Question(["a", "b"])
    if code == "retired":
        asked.retired("a")
    else:
        asked.sent("a")
        if late:
            asked.unheard("a")
        if code == "silent":
            asked.unheard("a")
        else:
            asked.failed("a", code)
    asked.sent("b")
    asked.answered("b")
    asked.closed()
    assert asked.codes == {"a": code}
    read = Question.replayed(["b"], asked.dropped, asked.refused_late)
    assert [read.state(name) for name in "ab"] == [asked.state(name) for name in "ab"]
    assert (read.dropped, read.refused_late) == (asked.dropped, asked.refused_late)
    assert read.maybe_charged == asked.maybe_charged


# --- what is shown as spent ----------------------------------------------------------------------


class Killed(BaseException):
    pass


def killed_at(sending):
    """Return a set-up in which the server dies once it has sent its n-th frame."""

    def set_up(silo, carrier):
        honest, count = carrier.exchange, itertools.count(1)

        def exchange(frames, timeout):
            if next(count) == sending:
                honest(frames, timeout)
                raise Killed
            return {}

        carrier.exchange = exchange

    return set_up


def replying(trick):
    """Return a set-up in which the silo replies like this."""

    def set_up(silo, carrier):
        silo.trick = trick

    return set_up


def removed(silo, carrier):
    carrier.down = carrier.removed = {silo.name}


def refused_late(silo, frame, reply):
    return None if len(silo.frames) == 1 else Refusal("expired")


SCENES = {
    State.SENT: killed_at(1),
    State.UNSETTLED: killed_at(2),
    State.ANSWERED: replying(lambda silo, frame, reply: reply),
    State.REFUSED: replying(lambda silo, frame, reply: Refusal("expired")),
    State.REFUSED_LATE: replying(refused_late),
    State.KNOWN: replying(lambda silo, frame, reply: Refusal("purged")),
    State.INVALID: replying(lambda silo, frame, reply: replace(reply, value=reply.value[:, :-1])),
    State.REMOVED: removed,
    State.SILENT: replying(lambda silo, frame, reply: None),
}


def shown(problem, records, folder, set_up):
    """Return the first silo's state after one question to two silos, the epsilon that the run shows
    as spent there, and how many charges it counts.
    """
    silos = [Silo(i, problem, records.select([i])) for i in range(2)]
    cards = [silo.card for silo in silos]
    carrier = Local(silos)
    set_up(silos[0], carrier)
    folder.mkdir()
    record = Progress(folder, keep=False)
    spending = Spending(
        cards, plan_order(Order("mb-sgd", rounds=1, epsilon=("1.0",)), cards).plan, record
    )
    states = []

    def report(outcome, heard):
        states.append(channel.question.state("silo-0"))
        spending.note(outcome, heard)

    channel = Remote(cards, carrier, run="run", key=ASKER, timeouts=WAITS, report=report)
    with contextlib.suppress(Killed):
        channel.ask(gradient(problem, 2.0), range(2))
    if channel.pending:
        states.append(channel.question.state("silo-0"))
        spending.charge(*channel.pending)
    record.close()
    return states[-1], spending.spent()["silo-0"], channel.charges["silo-0"]


@pytest.mark.parametrize("state", SCENES)
def test_a_silo_that_may_have_been_charged_is_shown_with_what_it_spent(
    state,
    three,  # noqa: F811
    tmp_path,
):
    found, spent, charges = shown(*three, tmp_path / "run", SCENES[state])
    assert found is state
    if state is State.REFUSED:
        assert (spent, charges) == (0.0, 0)
    else:
        assert spent > 0.1
        assert charges == 1


def test_a_state_that_is_left_out_of_the_table_is_seen(three, tmp_path, monkeypatch):  # noqa: F811
    """Plant the mistake for each state: what the run shows as spent is then too little."""
    assert SCENES.keys() >= MAY_BE_CHARGED
    for state in MAY_BE_CHARGED:
        monkeypatch.setattr(machine, "MAY_BE_CHARGED", MAY_BE_CHARGED - {state})
        found, spent, charges = shown(*three, tmp_path / state.name, SCENES[state])
        assert (found, spent, charges) == (state, 0.0, 0)
