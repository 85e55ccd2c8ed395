"""What could be verified of a run on this machine: its evidence archive, and the caller's own
checks. Pages show the result beside the run's title.
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
"""The word on a badge, and the class that colours it."""


@dataclass(frozen=True)
class Checked:
    """The result of one check: a state from `STATES`, and words about what was verified, or how to
    verify it.
    """

    state: str
    words: str
    archive: Path | None = None
    """Path of the evidence archive, if it was verified."""

    def badge(self) -> Markup:
        return tag(
            "p",
            tag("span", self.state, class_=f"state {STATES[self.state]}"),
            sentence(f" {self.words}"),
            class_="small badge",
        )


Check = Callable[[runs.Run], Sequence[Checked]]
"""A check of the caller, in addition to the evidence."""


def checks_of(run: runs.Run, more: Check | None = None) -> list[Checked]:
    """Return the results of all checks of a run. Return none while the run is being written."""
    if run.state == "running":
        return []
    with runs.readable(run.folder):
        if more is None:
            return _evident(run)
        return [*more(run), *_evident(run)]


def badges(found: Sequence[Checked]) -> Markup:
    return join(one.badge() for one in found)


def archive_in(found: Sequence[Checked]) -> Path | None:
    """Return the path of the run's evidence if it was verified, else None."""
    return next((one.archive for one in found if one.archive), None)


def _evident(run: runs.Run) -> list[Checked]:
    """Check the archive of `silodp export evidence` beside the run, found by its name.

    An archive in the working directory counts only if it is of this folder.
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
                "`silodp export evidence` writes a new one."
            ),
        )
    key = f"Its key is {found.key[:16]}…: ask the sender over another channel whether it is theirs."
    words = (
        f"The evidence {path.name} is unchanged since it was signed, and is of this "
        f"folder as it is now. {key}"
    )
    return Checked(VERIFIED, words, path)
