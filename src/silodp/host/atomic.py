"""The one writer of files: what it writes is whole or not there, and stays after a power cut."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.core.errors import BadInput
from silodp.host.portable import NO_LINK, OWN, sync_folder


def write(path: Path, text: str | bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Afterwards the file holds this text; at no time does it hold half of it. Of several writers
    at once, the last one's stays whole.

    It is a new file, of this mode less the umask, whatever was there before; a link in its place is
    replaced, not followed. It outlives a power cut unless `durable` is False, as for figures of a
    run's progress.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    write_new(part, text, mode, durable=durable)
    try:
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def write_json(path: Path, what: Any, *, durable: bool = False) -> None:
    """For everybody to read."""
    write(path, json.dumps(what, indent=1) + "\n", mode=0o644, durable=durable)


def write_table(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any] | Mapping[str, Any]]
) -> None:
    """CSV, for everybody to read; of a mapping the columns alone."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [row.get(name, "") for name in columns] if isinstance(row, Mapping) else row for row in rows
    )
    write(path, text.getvalue(), mode=0o644, durable=False)


def write_new(path: Path, text: str | bytes, mode: int = 0o600, *, durable: bool = True) -> None:
    """Makes a file that was not there, FileExistsError where anything lies there already; what
    cannot be written whole is removed.

    Its content is on the disk afterwards; its name is once the folder is synced (`sync_folder`).
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | OWN, mode)
    try:
        rest = memoryview(text.encode() if isinstance(text, str) else text)
        while rest:
            rest = rest[os.write(file, rest) :]
        if durable:
            os.fsync(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def write_out(path: Path, text: str | bytes) -> None:
    """The new file that a user asked for with --out, which others may read; BadInput where it
    cannot be made.
    """
    try:
        write_new(path, text, 0o644)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be made ({error.strerror}); nothing is written over: choose "
            "another with --out"
        ) from None


@contextlib.contextmanager
def new_files(
    folder: Path, files: Mapping[str, str] | Mapping[str, str | bytes], *, mode: int = 0o711
) -> Iterator[None]:
    """Makes all of these files, and the folders that they need, for their owner alone; none of them
    is new if one cannot be made or the body fails.

    BadInput says which file was in the way. `mode` is that of new folders: by default others may
    pass through, to a socket say, and see nothing.
    """
    with contextlib.ExitStack() as undo:
        try:
            folder.mkdir(mode=mode, parents=True, exist_ok=True)
            for path, text in ((folder / name, text) for name, text in files.items()):
                path.parent.mkdir(mode=mode, parents=True, exist_ok=True)
                write_new(path, text)
                undo.callback(path.unlink)
            for place in {(folder / name).parent for name in files}:
                sync_folder(place)
            yield
        except OSError as error:
            raise BadInput(
                f"{error.filename or folder} cannot be made: {error.strerror}; nothing is "
                "ever written over"
            ) from None
        undo.pop_all()
