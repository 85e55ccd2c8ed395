"""Record what `silodp stats` was asked, its price and its answer, for `silodp report` and `silodp
export evidence`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from silodp import __version__
from silodp.cli.console import say
from silodp.core.errors import BadInput
from silodp.runs import Kind, RunFolder

RecordIn = Annotated[
    Path | None,
    typer.Option(
        "--record",
        help="Add question, price and answer to this folder, for `silodp report` and `silodp "
        "export evidence`.",
    ),
]


@dataclass(frozen=True)
class Recorder:
    """Writes the answers of one command into a folder, or nowhere."""

    folder: Path | None
    command: str
    words: Mapping[str, Any]

    @classmethod
    def into(cls, folder: Path | None, command: str, **words: Any) -> Recorder:
        """Return a recorder of this command with these words. Raise BadInput for a folder that
        cannot be used, before anything is asked.
        """
        if folder:
            try:
                kind = RunFolder(folder).kind()
                if kind not in (Kind.NONE, Kind.STATISTICS):
                    raise BadInput(
                        f"{folder} contains a run of another command; choose another folder for "
                        "--record"
                    )
                folder.mkdir(parents=True, exist_ok=True)
                with RunFolder(folder).statistics.open("a", encoding="utf-8"):
                    pass
            except OSError as error:
                raise BadInput(
                    f"{folder} cannot be written ({error.strerror}); choose another folder for "
                    "--record"
                ) from None
        given = {name: value for name, value in words.items() if value not in (None, (), "", False)}
        return cls(folder, command, given)

    def write(self, answer: Mapping[str, Any], *, quiet: bool) -> None:
        """Add a line with the answer, unless the last line of the same question has it already: a
        question that was asked again costs nothing more.
        """
        if not self.folder:
            return
        found = {name: value for name, value in answer.items() if name != "out"}  # a path
        made = {"command": self.command, "asked": dict(self.words), "answer": found}
        text = json.dumps(made, sort_keys=True)
        file = RunFolder(self.folder).statistics
        known = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        same = [{name: line.get(name) for name in made} for line in known]
        if text not in [json.dumps(line, sort_keys=True) for line in same]:
            about = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "silodp": __version__,
            }
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(about | made) + "\n")
        if not quiet:
            say(f"Recorded in {self.folder}. `silodp report {self.folder}` shows it.")


def of_federation(folder: Path, command: str, **words: Any) -> Recorder:
    """Return the recorder of a federation's folder, in which every answer is recorded."""
    return Recorder.into(folder / "statistics", command, **words)
