"""The state of one question at each silo that it is for.

Theory of operation. The server sends one signed frame to a silo, again and again, until the silo
settles the question or the deadline passes. A gate charges its ledger before it answers. The reply
can be lost on its way back. So a silo may have been charged although the server has no answer. What
the server shows as spent must count each silo that may have been charged.

At any time a question to a silo is in exactly one state:

- `NEW`: no frame has gone out.
- `UNASKED`: no frame will go out. The silo has left the run.
- `SENT`: the first frame has gone out. Nothing has come back.
- `UNSETTLED`: a frame has gone out and nothing final has come back. The ledger may have charged for
  it. From now on a refusal no longer proves that there was no charge. A question that a killed
  server may have sent begins here.
- `ANSWERED`: a valid answer is here.
- `REFUSED`: the gate refused the first frame for good. It charges only for what it answers, so it
  has not charged.
- `REFUSED_LATE`: the gate refused a later frame for good. It may have charged for an earlier one.
- `KNOWN`: the gate refused because its ledger has the question, or one of its round, already.
- `INVALID`: the silo signed an answer that does not fit the question.
- `REMOVED`: the operator of the carrier removed the silo before it replied.
- `SILENT`: the deadline passed and nothing final had come. Also a silo that was silent before and
  is not to be seen now: it is not asked, but the journal has one code for both, so both count.

`NEW`, `SENT` and `UNSETTLED` are open: the question can still change. The others are final.
`TRANSITIONS` is the whole machine. An event that it lacks is a mistake in this program and raises
`ImpossibleEvent`. `MAY_BE_CHARGED` names the states that count as spent, and
`Question.maybe_charged` reads it.

A code is the word for people that goes into the journal and the summary. Many codes lead to one
state: `event_of` gives the event of each. So a question from the journal gets the states that it
had when it was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto

PASSING = frozenset({"busy", "stopping", "paused", "rate", "ledger", "internal"})
"""Refusals that may pass. The same bytes are sent again until the deadline."""
FORGED = "forged"
"""A reply that the silo has not signed about this question. It may be the carrier's work."""
SILENT_CODE = "silent"
RETIRED_CODE = "retired"
REMOVED_CODE = "removed"
INVALID_CODE = "value"
KNOWN_CODES = frozenset({"purged", "id-reused", "round"})
"""Refusals after which the ledger may have a charge for the question."""


class QuestionState(Enum):
    """A state of one question at one silo. The docstring of the module explains each state."""

    NEW = auto()
    UNASKED = auto()
    SENT = auto()
    UNSETTLED = auto()
    ANSWERED = auto()
    REFUSED = auto()
    REFUSED_LATE = auto()
    KNOWN = auto()
    INVALID = auto()
    REMOVED = auto()
    SILENT = auto()


class QuestionEvent(Enum):
    """What can happen to a question at one silo."""

    RETIRED = auto()
    """The silo has left the run."""
    RESUMED = auto()
    """A server that was killed may have sent the frame."""
    PASSED_OVER = auto()
    """The silo was silent before, and the carrier does not see it."""
    SENT = auto()
    """A frame goes out."""
    NO_REPLY = auto()
    """The wait for this frame is over and no reply has come."""
    PUT_OFF = auto()
    """A reply has come that settles nothing: a refusal that may pass, or a forged reply."""
    ANSWERED = auto()
    """A valid answer is here, from the silo or from the disk."""
    INVALID = auto()
    """A signed answer has come that does not fit the question."""
    REFUSED = auto()
    """The gate refuses this question for good."""
    KNOWN = auto()
    """The gate refuses because its ledger has the question already."""
    REMOVED = auto()
    """The operator of the carrier has removed the silo."""
    DEADLINE = auto()
    """The server waits no longer."""


_S = QuestionState
_E = QuestionEvent
TRANSITIONS: Mapping[tuple[QuestionState, QuestionEvent], QuestionState] = {
    (_S.NEW, _E.RETIRED): _S.UNASKED,
    (_S.NEW, _E.RESUMED): _S.UNSETTLED,
    (_S.NEW, _E.PASSED_OVER): _S.SILENT,
    (_S.NEW, _E.SENT): _S.SENT,
    (_S.NEW, _E.ANSWERED): _S.ANSWERED,
    (_S.NEW, _E.DEADLINE): _S.SILENT,
    (_S.SENT, _E.NO_REPLY): _S.UNSETTLED,
    (_S.SENT, _E.PUT_OFF): _S.UNSETTLED,
    (_S.SENT, _E.ANSWERED): _S.ANSWERED,
    (_S.SENT, _E.INVALID): _S.INVALID,
    (_S.SENT, _E.REFUSED): _S.REFUSED,
    (_S.SENT, _E.KNOWN): _S.KNOWN,
    (_S.SENT, _E.REMOVED): _S.REMOVED,
    (_S.UNSETTLED, _E.PASSED_OVER): _S.SILENT,
    (_S.UNSETTLED, _E.SENT): _S.UNSETTLED,
    (_S.UNSETTLED, _E.NO_REPLY): _S.UNSETTLED,
    (_S.UNSETTLED, _E.PUT_OFF): _S.UNSETTLED,
    (_S.UNSETTLED, _E.ANSWERED): _S.ANSWERED,
    (_S.UNSETTLED, _E.INVALID): _S.INVALID,
    (_S.UNSETTLED, _E.REFUSED): _S.REFUSED_LATE,
    (_S.UNSETTLED, _E.KNOWN): _S.KNOWN,
    (_S.UNSETTLED, _E.REMOVED): _S.REMOVED,
    (_S.UNSETTLED, _E.DEADLINE): _S.SILENT,
}
"""The state after an event, for every event that can happen in a state."""
OPEN = frozenset({_S.NEW, _S.SENT, _S.UNSETTLED})
"""States in which the silo is asked, or asked again."""
MAY_BE_CHARGED = frozenset(
    {
        _S.SENT,
        _S.UNSETTLED,
        _S.ANSWERED,
        _S.REFUSED_LATE,
        _S.KNOWN,
        _S.INVALID,
        _S.REMOVED,
        _S.SILENT,
    }
)
"""States in which the silo's ledger may have a charge for the question."""


class ImpossibleEvent(RuntimeError):
    """An event that cannot happen in the state that the question is in."""


def next_state(state: QuestionState, event: QuestionEvent) -> QuestionState:
    """Return the state after the event. Raise ImpossibleEvent where the table has none."""
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise ImpossibleEvent(
            f"the event {event.name} happened to a question in the state {state.name}, "
            "which the table of transitions lacks; this is a mistake in silodp"
        )
    return found


def event_of(code: str) -> QuestionEvent:
    """Return the event that a code stands for. A code without a row is a refusal for good."""
    if code in PASSING or code == FORGED:
        return QuestionEvent.PUT_OFF
    if code in KNOWN_CODES:
        return QuestionEvent.KNOWN
    if code == INVALID_CODE:
        return QuestionEvent.INVALID
    if code == REMOVED_CODE:
        return QuestionEvent.REMOVED
    return QuestionEvent.REFUSED


class Question:
    """The states of one question at the silos that it is for, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._states = dict.fromkeys(names, QuestionState.NEW)
        self.codes: dict[str, str] = {}
        """Why a silo has not answered, in the order in which the silos first failed."""

    @classmethod
    def replayed(
        cls, answered: Iterable[str], codes: Mapping[str, str], refused_late: Iterable[str]
    ) -> Question:
        """Return the question as the journal has it, by the events that led to it."""
        question = cls([*answered, *codes])
        late = frozenset(refused_late)
        for name in answered:
            question.sent(name)
            question.answered(name)
        for name, code in codes.items():
            if code == RETIRED_CODE and name not in late:
                question.retired(name)
                continue
            question.sent(name)
            if name in late:
                question.unheard(name)
            if code != SILENT_CODE:
                question.failed(name, code)
            else:
                question.unheard(name)
        question.closed()
        return question

    def state(self, name: str) -> QuestionState:
        """Return the state at this silo."""
        return self._states[name]

    @property
    def open(self) -> list[str]:
        """Return the silos that are asked, or asked again."""
        return [name for name, state in self._states.items() if state in OPEN]

    @property
    def dropped(self) -> dict[str, str]:
        """Return why silos have not answered, in the order of the question's silos."""
        return {name: self.codes[name] for name in self._states if name in self.codes}

    @property
    def refused_late(self) -> tuple[str, ...]:
        """Return the silos that refused a later frame, in the order in which they first failed."""
        late = QuestionState.REFUSED_LATE
        return tuple(name for name in self.codes if self._states[name] is late)

    @property
    def maybe_charged(self) -> frozenset[str]:
        """Return the silos whose ledger may have a charge for the question."""
        return frozenset(name for name, state in self._states.items() if state in MAY_BE_CHARGED)

    def retired(self, name: str) -> None:
        """Note that the silo has left the run and gets no frame."""
        self._happened(name, QuestionEvent.RETIRED)
        self.codes[name] = RETIRED_CODE

    def resumed(self, name: str) -> None:
        """Note that a killed server may have sent the frame."""
        self._happened(name, QuestionEvent.RESUMED)

    def passed_over(self, name: str) -> None:
        """Note that the silo is not asked, because it was silent and the carrier does not see
        it.
        """
        self._happened(name, QuestionEvent.PASSED_OVER)
        self.codes[name] = SILENT_CODE

    def sent(self, name: str) -> None:
        """Note that a frame goes out to the silo."""
        self._happened(name, QuestionEvent.SENT)

    def unheard(self, name: str) -> None:
        """Note that no reply to the last frame has come in time."""
        self._happened(name, QuestionEvent.NO_REPLY)

    def answered(self, name: str) -> None:
        """Note that a valid answer is here."""
        self._happened(name, QuestionEvent.ANSWERED)
        self.codes.pop(name, None)

    def failed(self, name: str, code: str) -> None:
        """Note that the silo did not answer, for the reason that the code names."""
        self._happened(name, event_of(code))
        self.codes[name] = code

    def closed(self) -> None:
        """Note that the server does not wait any longer. A silo keeps the code that it gave
        last.
        """
        for name in self.open:
            self._happened(name, QuestionEvent.DEADLINE)
            self.codes.setdefault(name, SILENT_CODE)

    def _happened(self, name: str, event: QuestionEvent) -> None:
        """Go to the state after the event. Raise ImpossibleEvent if the event cannot happen now."""
        self._states[name] = next_state(self._states[name], event)
