"""The secret files of a run: a tuning's seed and its runs that were not chosen, and the key of the
mark that recognises records.

A mark without a secret key would reveal a record to anyone who has all other records.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.host import atomic
from silodp.runs import RunFolder
from silodp.silo.data.records import Records
from silodp.silo.ledger.identity import Registry

KEY = "records.key"
"""The file with this user's key, beside the registry of ledgers."""


def hidden_of(folder: Path, *, central: bool) -> Path:
    """Return the folder for the secret files of a tuning in `folder`.

    A trusted curator's secret folder is beside `folder`, which is created only at the end. The
    times of a folder would otherwise show how long the tuning took, and so how many runs it had.
    """
    if central:
        return folder.resolve().parent / f".{folder.resolve().name}.secret"
    return folder / "runs"


def open_hidden(hidden: Path) -> None:
    """Create the folder for this user alone."""
    hidden.mkdir(mode=0o700, exist_ok=True)
    hidden.chmod(0o700)


def seed_of(hidden: Path, given: int | None, records: Records) -> int:
    """Return the seed of all noise in the folder, for these very records.

    The same noise on other records would show where they differ. Raise BadInput if the folder has
    runs but no seed, or if the records are others.
    """
    if not RunFolder(hidden).seed.exists() and any(hidden.glob("*.safetensors")):
        raise BadInput(
            f"{hidden} has runs but no longer their seed, so that they cannot be "
            "continued; choose another --out"
        )
    return kept_seed(RunFolder(hidden).seed, given, records)


def kept_seed(path: Path, given: int | None, records: Records) -> int:
    """Return the seed in the file, for these very records. Create the file if it does not exist.

    `given` is the seed of a new file, by default a random one. Raise BadInput if the file cannot be
    read, or if the records are others.
    """
    if path.exists():
        try:
            content = json.loads(path.read_text())
            seed = int(content["seed"])
            mark = str(content["records"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"the seed {path} cannot be read ({type(error).__name__}); restore it, or "
                "choose another --out"
            ) from None
        if not hmac.compare_digest(mark.encode(), _mark(str(seed), records).encode()):
            raise BadInput(
                f"the records are not those with which {path.parent} was begun; restore "
                "them, or choose another --out"
            )
        return seed
    if given is None:
        seed = secrets.randbits(128)
    else:
        seed = given
    atomic.write(path, json.dumps({"seed": seed, "records": _mark(str(seed), records)}))
    return seed


def mark_of(records: Records) -> str:
    """Return a mark of the records for a folder that others may read.

    The mark has a key that stays with this user, and a new salt. So two marks do not show whether
    the records have changed.
    """
    salt = secrets.token_hex(16)
    return json.dumps({"salt": salt, "records": _mark(_user_key() + salt, records)}) + "\n"


def places_key(seed: int | None) -> str:
    """Return the key that assigns persons to the two sides of a held-out split.

    It is this user's secret, or a given seed. With a given seed all noise is public anyway.
    """
    if seed is None:
        return f"places {_user_key()}"
    return f"places {seed}"


def _user_key() -> str:
    """Return this user's key. Create it if it does not exist."""
    registry = Registry()
    path = registry.folder.parent / KEY
    with registry.locked():
        if not path.exists():
            atomic.write(path, secrets.token_hex(32))
    return path.read_text()


def check_mark(folder: Path, records: Records) -> None:
    """Raise BadInput unless the mark in the run's folder is of these very records, in this
    order.
    """
    key = Registry().folder.parent / KEY
    try:
        mark = json.loads(RunFolder(folder).record_mark.read_text())
        present = _mark(key.read_text() + mark["salt"], records)
        same = hmac.compare_digest(mark["records"], present)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"it cannot be checked whether these are the records of the run in {folder} "
            f"({type(error).__name__}): the check needs its records.json and the key {key} of the "
            "user who trained it; train again"
        ) from None
    if not same:
        raise BadInput(
            f"the records are not those with which the run in {folder} was trained, in their "
            "order, so the held-out records may include some that it was trained on; restore the "
            "records, or train again"
        )


def _mark(key: str, records: Records) -> str:
    """Return the keyed hash of the records, in hexadecimal."""
    mark = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (records.x, records.y):
        mark.update(
            f"{part.dtype} {tuple(part.shape)} ".encode() + part.contiguous().numpy().tobytes()
        )
    return mark.hexdigest()


def renew(folder: Path) -> None:
    """Delete an empty folder that was there before, so that a new one gets a new date of
    creation.
    """
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def clean_up(folder: Path, hidden: Path, *, central: bool) -> None:
    """Delete the secret files, once the answer is written.

    Without a curator only the seed is deleted, because known noise protects no record. A curator's
    folder must show neither the runs that were not chosen nor their number: the theorem prices the
    best run alone. So all of its files get the same time, and the runs are deleted.
    """
    if not central:
        RunFolder(hidden).seed.unlink(missing_ok=True)
        return
    when = RunFolder(folder).tuning.stat().st_mtime_ns
    # The times are set before the runs are deleted: more runs take longer to delete.
    if any(path.stat().st_mtime_ns != when for path in (*folder.iterdir(), folder)):
        for path in (*folder.iterdir(), folder):
            os.utime(path, ns=(when, when))
    if hidden.exists():
        shutil.rmtree(hidden)
