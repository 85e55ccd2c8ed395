"""Files of a run folder that somebody may be writing, or have put there: only plain ones are
opened, and half a line is not there yet.
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

from silodp.host.portable import AT_ONCE, NO_LINK, OWN, lock


def opened(path: Path) -> io.BufferedReader:
    """A plain file, for reading; OSError if anything else lies there, such as a link, or a pipe
    that would keep the reader waiting.
    """
    handle = os.open(path, os.O_RDONLY | NO_LINK | AT_ONCE | OWN)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file")
    return open(handle, "rb")


def content(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def json_in(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none, or half of one."""
    try:
        found = json.loads(content(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def progress(lines: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Of the lines in progress.jsonl the last about each question that has come to its end."""
    known: dict[int, dict[str, Any]] = {}
    for found in lines:
        try:
            known[int(found["question"])] = found
        except (ValueError, KeyError, TypeError):
            continue
    return tuple(known[question] for question in sorted(known))


def ahead(lines: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """What silos will have spent once a question is charged that has no answer yet: a line as of
    `progress`, or none.
    """
    last = (lines or ({},))[-1]
    return (
        ({"question": int(last["asking"]), "kind": "unanswered", "dropped": {}} | last,)
        if "asking" in last
        else ()
    )


def lines_in(path: Path) -> tuple[dict[str, Any], ...]:
    """The objects in a file, one a line; a torn line is not there yet."""
    try:
        text = content(path)
    except OSError:
        return ()
    found = []
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return tuple(line for line in found if isinstance(line, dict))


def locked(folder: Path) -> bool:
    """Whether a process holds progress.jsonl, and so goes on with the run."""
    try:
        with opened(folder / "progress.jsonl") as file:
            return not lock(file, shared=True)
    except OSError:
        return False
