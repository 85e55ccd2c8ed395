"""Write files atomically: a reader finds the complete file or none.

A file that is written durably also survives a power cut.
"""

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
    """Write a file atomically, and replace what was at the path.

    A reader finds the old content or the new one, never a part. Of several writers at once, the
    last one's file stays, complete. The file is new and has this mode less the umask. A link at the
    path is replaced and not followed. The file survives a power cut unless `durable` is False, as
    for figures of a run's progress.
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


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write a value as JSON, in a file that every user may read."""
    write(path, json.dumps(value, indent=1) + "\n", mode=0o644, durable=durable)


def write_table(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any] | Mapping[str, Any]]
) -> None:
    """Write a CSV file that every user may read.

    A row that is a mapping contributes its values of `columns` only.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        if isinstance(row, Mapping):
            writer.writerow([row.get(name, "") for name in columns])
        else:
            writer.writerow(row)
    write(path, text.getvalue(), mode=0o644, durable=False)


def write_new(path: Path, text: str | bytes, mode: int = 0o600, *, durable: bool = True) -> None:
    """Make a new file. Raise FileExistsError if the path exists.

    A file that cannot be written completely is removed. The content is on disk at the return. The
    name is on disk once the folder is synced (`sync_folder`).
    """
    if isinstance(text, str):
        text = text.encode()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | OWN, mode)
    try:
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(file, rest) :]
        if durable:
            os.fsync(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def write_out(path: Path, text: str | bytes, *, mode: int = 0o644) -> None:
    """Make the new file that a user named with --out, readable by every user unless `mode` is
    another.

    Raise BadInput if it cannot be made.
    """
    try:
        write_new(path, text, mode)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be made ({error.strerror}){_why(error)}; choose another with --out"
        ) from None


@contextlib.contextmanager
def new_files(
    folder: Path, files: Mapping[str, str] | Mapping[str, str | bytes], *, mode: int = 0o711
) -> Iterator[None]:
    """Make all these files, and the folders they need, for their owner alone.

    If one cannot be made, or the body fails, all of them are removed. Raise BadInput with the name
    of the file that is in the way. `mode` is the mode of new folders. By default other users may
    pass through a new folder, for example to a socket, but cannot list it.
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
                f"{error.filename or folder} cannot be made: {error.strerror}{_why(error)}; "
                "choose another path"
            ) from None
        undo.pop_all()


def _why(error: OSError) -> str:
    """Return why a path that exists already is in the way, or nothing for another error."""
    if isinstance(error, FileExistsError):
        return "; silodp does not overwrite files"
    return ""
