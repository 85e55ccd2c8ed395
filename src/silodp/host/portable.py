"""Where systems differ about files: flags that `os.open` has on some of them only, and a lock.
Daemons need Linux; everything else goes through this.
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
"""Not for child processes, and bytes as they are."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
AT_ONCE = getattr(os, "O_NONBLOCK", 0)
FOLDER = getattr(os, "O_DIRECTORY", 0)
"""0 on Windows, where a folder cannot be opened."""
_FAR = 2**40
"""Windows locks bytes, which nobody else can then read: this one lies behind the end of every file.
"""


def lock(file: int | IO[bytes] | IO[str], *, shared: bool = False, wait: bool = False) -> bool:
    """Whether this process has the file's lock now, which goes when the file is closed. Windows has
    no shared one: there, each is alone.
    """
    if isinstance(file, int):
        handle = file
    else:
        handle = file.fileno()
    try:
        import fcntl
    except ImportError:
        return _windows(handle, wait)
    try:
        fcntl.flock(
            handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        )
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
    """One process at a time. The folder itself is what is locked, so that no file is added to it;
    on Windows a file in it.
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
    """Makes new, renamed and deleted names in the folder durable; Windows has no such call."""
    if FOLDER:
        handle = os.open(folder, os.O_RDONLY | FOLDER)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
