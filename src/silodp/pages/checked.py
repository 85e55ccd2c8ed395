"""What of a run could be checked on this machine, in words beside its title: its evidence, and
whatever else the caller could check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.pages import evidence, runs
from silodp.pages.markup import Markup, join, sentence, tag

VERIFIED = "verified"
PARTLY = "verified in part"
DIFFERS = "does not match"
NOT_HERE = "not checked here"
STATES = {VERIFIED: "finished", PARTLY: "finished", DIFFERS: "refused", NOT_HERE: "soft"}
"""What a badge says, and the class that colours it."""


@dataclass(frozen=True)
class Checked:
    """One thing that was looked at: what came of it (one of `STATES`), and in words what was looked
    at or, where nothing could be, how to.
    """

    state: str
    words: str
    archive: Path | None = None
    """Of evidence that was verified: where it lies."""

    def badge(self) -> Markup:
        return tag(
            "p",
            tag("span", self.state, class_=f"state {STATES[self.state]}"),
            sentence(f" {self.words}"),
            class_="small badge",
        )


Check = Callable[[runs.Run], Sequence[Checked]]
"""What the caller can check of a run besides its evidence."""


def checks_of(run: runs.Run, more: Check | None = None) -> list[Checked]:
    """What can be said of a run that is not being written any more."""
    if run.state == "running":
        return []
    with runs.readable(run.folder):
        return [*(more(run) if more else ()), *_evident(run)]


def badges(found: Sequence[Checked]) -> Markup:
    return join(one.badge() for one in found)


def archive_in(found: Sequence[Checked]) -> Path | None:
    """The run's evidence, if it was verified."""
    return next((one.archive for one in found if one.archive), None)


def _evident(run: runs.Run) -> list[Checked]:
    """The archive of `silodp export evidence` beside the run, by its name; one where the command
    was started counts if it is of this very folder.
    """
    folder = run.folder.resolve()
    beside, here = (place / f"{folder.name}-evidence.zip" for place in (folder.parent, Path.cwd()))
    for path in dict.fromkeys((beside, here)):
        if path.is_file() and not path.is_symlink():
            found = _compared(path, run)
            if path == beside or found.archive:
                return [found]
    return []


def _compared(path: Path, run: runs.Run) -> Checked:
    try:
        found = evidence.verify(path.read_bytes())
    except (BadInput, OSError) as error:
        if isinstance(error, BadInput):
            why = f"is refused: {error}"
        else:
            why = "cannot be read"
        return Checked(DIFFERS, f"The evidence {path.name} {why}.")
    if found.about.get("fingerprint") != runs.fingerprint(run.folder):
        made = f"made {found.about.get('made', 'at some time')}"
        return Checked(
            DIFFERS,
            (
                f"The evidence {path.name}, {made}, is not of this folder as it is now; "
                "`silodp export evidence` makes another."
            ),
        )
    key = f"Its key is {found.key[:16]}…: whose that is has to be known by another way."
    words = (
        f"Every byte of the evidence {path.name} is as it was signed, and it is of this folder "
        f"as it is now. {key}"
    )
    return Checked(VERIFIED, words, path)
