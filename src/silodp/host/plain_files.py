"""Read files that another process may be writing, or that another person may have sent.

Only plain files are opened, and half a line is left out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from silodp.host.portable import AT_ONCE, NO_LINK, OWN


def opened(path: Path) -> io.BufferedReader:
    """Open a plain file for reading.

    Raise OSError for anything else, such as a link, or a pipe that would block the reader.
    """
    handle = os.open(path, os.O_RDONLY | NO_LINK | AT_ONCE | OWN)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file")
    return open(handle, "rb")


def content(path: Path) -> bytes:
    """Return the bytes of a plain file."""
    with opened(path) as file:
        return file.read()


def json_in(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one if there is no complete object."""
    try:
        value = json.loads(content(path))
    except (OSError, ValueError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def lines_in(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the objects in a file that has one on each line. A torn last line is left out."""
    try:
        text = content(path)
    except OSError:
        return ()
    values = []
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return tuple(value for value in values if isinstance(value, dict))
