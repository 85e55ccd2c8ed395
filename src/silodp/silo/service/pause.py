"""Pause the gate: while the file "paused" is in the policy's folder, the daemon refuses every
frame.

This includes the time after a restart. If the policy is a link, both the folder of the link and the
folder of its target count, whichever path a command was given. The gate answers only if a check
finds no file. A check that fails, for whatever reason, pauses it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from silodp.core.errors import BadInput

NAME = "paused"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def paused(policy: str | Path) -> bool:
    """Return whether the gate is paused: by anything of that name, or by a folder that cannot be
    opened.
    """
    for folder in _folders(policy):
        try:
            handle = os.open(folder, FOLDER)
        except OSError:
            return True
        try:
            if _marked(handle):
                return True
        finally:
            os.close(handle)
    return False


def _folders(policy: str | Path) -> list[Path]:
    path = Path(policy).absolute()
    return list(dict.fromkeys((path.parent, Path(os.path.realpath(path)).parent)))


def _marked(folder: int) -> bool:
    """Return whether the folder has the file, or cannot be searched."""
    try:
        os.stat(NAME, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


class Pause:
    """A daemon's check of its pause, which includes the folder as it was at the start.

    That folder may be renamed while the daemon runs.
    """

    def __init__(self, policy: str | Path) -> None:
        self._policy = Path(policy).absolute()
        try:
            self._folder = os.open(self._policy.parent, FOLDER)
        except OSError as error:
            raise BadInput(
                f"the policy's folder {self._policy.parent} cannot be opened: "
                f"{error.strerror}; let the gate's user read it"
            ) from None

    def on(self) -> bool:
        """Return whether the gate is paused."""
        return _marked(self._folder) or paused(self._policy)

    def close(self) -> None:
        os.close(self._folder)


def set_paused(policy: str | Path, wanted: bool) -> None:
    """Pause the gate or end its pause. An answer that is being computed is finished.

    Raise BadInput if the file cannot be written or removed.
    """
    for path in (folder / NAME for folder in _folders(policy)):
        try:
            if wanted and not os.path.lexists(path):
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(path, flags, 0o644), "w") as file:
                    file.write(f"paused {datetime.now(UTC).isoformat(timespec='seconds')}\n")
            elif not wanted and os.path.lexists(path):
                path.unlink(missing_ok=True)
        except OSError as error:
            done = "written" if wanted else "removed"
            raise BadInput(
                f"{path} cannot be {done}: {error.strerror}; run this as the gate's own user"
            ) from None
