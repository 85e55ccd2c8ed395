"""Name the files of a run's folder, and find the state of the run in it.

A `RunFolder` is the only place with the names of these files. Its `state` is the only answer to
"in which state is this run?": `status`, `report`, `ui` and every `--resume` read it.

| kind       | made by             | it is finished when                                       |
|------------|---------------------|-----------------------------------------------------------|
| TRAINING   | `train`             | its result can be read                                    |
| FEDERATION | `federation run`    | its result counts every question and says "finished"      |
| PEERS      | `... run --peers`   | the run of each silo, in a folder of its own, is finished |
| COMPARISON | `research figures`  | its result has rows                                       |
| TUNING     | `tune`              | it has tune.json                                          |
| STATISTICS | `stats --record`    | always: each line is an answer                            |

A run's result is in summary.json. A folder of an earlier version is read as well: there, a
training's result is in spent.json, and an evaluation adds its price to that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from silodp.host.plain_files import content, json_in, lines_in, opened
from silodp.host.portable import lock


class Kind(StrEnum):
    """The command that made the folder."""

    NONE = ""
    TRAINING = "train"
    FEDERATION = "federation"
    PEERS = "peers"
    COMPARISON = "compare"
    TUNING = "tune"
    STATISTICS = "statistics"


class State(StrEnum):
    """How far a run came."""

    NOTHING = ""
    """There is no run."""
    RUNNING = "running"
    """A process works on it now."""
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """It was killed, or it ended early. It can be resumed."""
    ENDED = "ended early"
    """It stopped before its end. It cannot be resumed."""


DESCRIPTION = "run.json"
CONFIGURATION = "config.json"
OLD_RESULT = "spent.json"
STATISTICS = "statistics.jsonl"


class RunFolder:
    """One folder that holds a run, or may get one."""

    def __init__(self, path: Path) -> None:
        """Name the files below `path`. Nothing is read or made."""
        self.path = path
        self.description = path / DESCRIPTION
        """The order, and what the run was given. It is written before the first question."""
        self.configuration = path / CONFIGURATION
        """Everything that decides the result of a comparison or a tuning."""
        self.peers = path / "peers.json"
        """The run's id and its silos, where every silo has a process and a folder of its own."""
        self.progress = path / "progress.jsonl"
        """A line for each question. The process that runs has a lock on it."""
        self.seed = path / "seed"
        """The seed of a training's noise. It is removed when the training ends."""
        self.record_mark = path / "records.json"
        """A mark by which a training's records are known again."""
        self.journal = path / "journal"
        self.replies = path / "replies"
        """What a federation's server needs to resume without a second price."""
        self.model = path / "model.safetensors"
        self.moments = path / "moments.safetensors"
        self.evaluations = path / "evaluations.jsonl"
        self.statistics = path / STATISTICS
        """A line for each answer to `silodp stats`: question, price and figures."""
        self.comparison = path / "personal.json"
        """Alone, together and personal, on raw held-out records. Not private."""
        self.transcript = path / "transcript.jsonl"
        self.releases = path / "transcript.safetensors"
        self.environment = path / "environment.json"
        self.data_facts = path / "data.json"
        self.tuning = path / "tune.json"
        self.settings = path / "settings.toml"

    @property
    def result(self) -> Path:
        """Return the file of the run's result: the one that is there, or the one to write."""
        result = self.path / "summary.json"
        old = self.path / OLD_RESULT
        if old.exists() and not result.exists():
            return old
        return result

    # --- what it is ------------------------------------------------------------------------------

    def kind(self) -> Kind:
        """Return the kind of run in the folder."""
        if self.configuration.exists():
            if "dataset" in json_in(self.configuration):
                return Kind.COMPARISON
            return Kind.TUNING
        if self.peers.exists():
            return Kind.PEERS
        if self.journal.exists() or "cards" in json_in(self.description):
            return Kind.FEDERATION
        if self.description.exists() or self.result.exists():
            return Kind.TRAINING
        if self.statistics.exists():
            return Kind.STATISTICS
        return Kind.NONE

    def state(self) -> State:
        """Return the state of the run in the folder."""
        kind = self.kind()
        if kind is Kind.PEERS:
            return self._state_of_peers()
        at_rest = self._state_at_rest(kind)
        if at_rest is not State.NOTHING and self.locked():
            return State.RUNNING
        return at_rest

    def state_at_rest(self) -> State:
        """Return the state that the files show, for the process that has the lock itself."""
        return self._state_at_rest(self.kind())

    def locked(self) -> bool:
        """Return whether a process has the lock on the progress, and so works on the run."""
        try:
            with opened(self.progress) as file:
                return not lock(file, shared=True)
        except OSError:
            return False

    def _state_at_rest(self, kind: Kind) -> State:
        match kind:
            case Kind.NONE:
                return State.NOTHING
            case Kind.TRAINING:
                return self._state_of_training()
            case Kind.FEDERATION:
                return self._state_of_federation()
            case Kind.PEERS:
                return self._state_of_peers()
            case Kind.COMPARISON:
                if self.rows():
                    return State.FINISHED
                return State.INTERRUPTED
            case Kind.STATISTICS:
                return State.FINISHED
            case Kind.TUNING:
                if self.tuning.exists():
                    return State.FINISHED
                return State.INTERRUPTED

    def _state_of_training(self) -> State:
        if self.result.exists():
            # A result that cannot be read is no reason to train again: the price was paid.
            if json_in(self.result):
                return State.FINISHED
            return State.ENDED
        if self.seed.exists():
            return State.INTERRUPTED
        return State.ENDED

    def _state_of_federation(self) -> State:
        if not self.description.exists():
            # Without the order nothing can be resumed, and the silos may have answered.
            return State.ENDED
        finished = self.current_result().get("ended") == "finished"
        if finished:
            return State.FINISHED
        return State.INTERRUPTED

    def _state_of_peers(self) -> State:
        silos = json_in(self.peers).get("silos", ())
        states = {RunFolder(self.path / str(name)).state() for name in silos}
        if State.RUNNING in states:
            return State.RUNNING
        if states == {State.FINISHED}:
            return State.FINISHED
        return State.INTERRUPTED

    # --- what it holds ---------------------------------------------------------------------------

    def current_result(self) -> dict[str, Any]:
        """Return a federation's result, or nothing if the run has gone on since it was written.

        An earlier version left the result of a run that stopped, and was resumed later.
        """
        found = json_in(self.result)
        if found.get("questions", 0) >= len(self.rounds()):
            return found
        return {}

    def rounds(self) -> tuple[dict[str, Any], ...]:
        """Return the last line about each question that has come to its end, in order."""
        known: dict[int, dict[str, Any]] = {}
        for found in lines_in(self.progress):
            try:
                known[int(found["question"])] = found
            except (ValueError, KeyError, TypeError):
                continue
        return tuple(known[question] for question in sorted(known))

    def ahead(self) -> tuple[dict[str, Any], ...]:
        """Return a line with what silos will have spent once the open question is charged.

        There is none unless the last question has no answer yet.
        """
        lines = lines_in(self.progress)
        if not lines or "asking" not in lines[-1]:
            return ()
        last = lines[-1]
        question = {"question": int(last["asking"]), "kind": "unanswered", "dropped": {}}
        return (question | last,)

    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return the rows of a comparison that is finished."""
        try:
            return tuple(json.loads(content(self.result)))
        except (OSError, ValueError, TypeError):
            return ()


def run_folders(root: Path, depth: int) -> Iterator[Path]:
    """Yield every folder with a run under `root`, at most `depth` below it. Follow no link."""
    return _folders_with((CONFIGURATION, DESCRIPTION, OLD_RESULT), root, depth)


def answer_folders(root: Path, depth: int) -> Iterator[Path]:
    """Yield every folder with recorded answers under `root`, as `run_folders` does with runs."""
    return _folders_with((STATISTICS,), root, depth)


def _folders_with(files: Sequence[str], root: Path, depth: int) -> Iterator[Path]:
    """Yield every folder with one of these files, at most `depth` below `root`. Follow no link."""
    try:
        names = {entry.name: entry for entry in os.scandir(root)}
    except OSError:
        return
    if any(name in names for name in files):
        yield root
    elif depth:
        for entry in names.values():
            if entry.is_dir(follow_symlinks=False):
                yield from _folders_with(files, Path(entry.path), depth - 1)
