"""The gate's pause: a file beside the policy. While it is there the daemon refuses every frame,
also after a restart.

Where the policy is a link, "beside" means both beside the link and beside what it points to,
whichever of the two a command was given. Only a look that finds nothing lets the gate answer: a
look that fails, for whatever reason, pauses it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from silodp.core.errors import BadInput

NAME = "paused"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def paused(policy: str | Path) -> bool:
    """Whatever lies there pauses the gate, and so does a folder that is not to be found."""
    for folder in _folders(policy):
        try:
            handle = os.open(folder, FOLDER)
        except OSError:
            return True
        try:
            if _lies_in(handle):
                return True
        finally:
            os.close(handle)
    return False


def _folders(policy: str | Path) -> list[Path]:
    path = Path(policy).absolute()
    return list(dict.fromkeys((path.parent, Path(os.path.realpath(path)).parent)))


def _lies_in(folder: int) -> bool:
    try:
        os.stat(NAME, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


class Pause:
    """A daemon's look at its pause: also through the folder as it was at the start, which may be
    renamed meanwhile.
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
        return _lies_in(self._folder) or paused(self._policy)

    def close(self) -> None:
        os.close(self._folder)


def set_paused(policy: str | Path, wanted: bool) -> None:
    """Afterwards the gate is paused, or not; an answer that is being computed is finished."""
    for path in (folder / NAME for folder in _folders(policy)):
        try:
            if wanted and not os.path.lexists(path):
                with open(
                    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644),
                    "w",
                ) as file:
                    file.write(f"paused {datetime.now(UTC).isoformat(timespec='seconds')}\n")
            elif not wanted and os.path.lexists(path):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(
                f"{path} cannot be {'written' if wanted else 'removed'}: {error.strerror}; "
                "run this as the gate's own user"
            ) from None
