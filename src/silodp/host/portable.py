"""Hide how systems differ about files: flags of `os.open` that some lack, and a lock.

Daemons need Linux. Everything else uses this module.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

OWN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Child processes do not get the file, and its bytes are read as they are."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
AT_ONCE = getattr(os, "O_NONBLOCK", 0)
FOLDER = getattr(os, "O_DIRECTORY", 0)
"""0 on Windows, where a folder cannot be opened."""
_FAR = 2**40
"""The byte that is locked on Windows, where no other process can read a locked byte. It is behind
the end of every file.
"""


def lock(file: int | IO[bytes] | IO[str], *, shared: bool = False, wait: bool = False) -> bool:
    """Return whether this process now has the file's lock. Closing the file ends the lock.

    Windows has no shared lock, so a shared lock is exclusive there.
    """
    if isinstance(file, int):
        handle = file
    else:
        handle = file.fileno()
    try:
        import fcntl
    except ImportError:
        return _windows(handle, wait)
    if shared:
        operation = fcntl.LOCK_SH
    else:
        operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(handle, operation)
    except BlockingIOError:
        return False
    return True


def _windows(handle: int, wait: bool) -> bool:
    msvcrt = importlib.import_module("msvcrt")
    here = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        while True:
            os.lseek(handle, _FAR, os.SEEK_SET)
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return True
            except OSError:
                if not wait:
                    return False
                time.sleep(0.02)
    finally:
        os.lseek(handle, here, os.SEEK_SET)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock the folder for one process at a time, and wait until it is free.

    The folder itself is locked, so that no file is added to it. On Windows a file in it is locked.
    """
    if FOLDER:
        handle = os.open(folder, os.O_RDONLY | FOLDER | OWN)
    else:
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | OWN)
    try:
        lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make new, renamed and deleted names in the folder durable. Windows has no such call."""
    if FOLDER:
        handle = os.open(folder, os.O_RDONLY | FOLDER)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
