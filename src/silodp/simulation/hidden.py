"""What of a run nobody else may read: a tuning's seed and the runs that it has not chosen, and the
key of a mark by which records are known again.

A mark without a secret key would tell whoever knows all records but one which that one is.
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
"""Where this user's key lies, beside the registry of ledgers."""


def hidden_of(folder: Path, *, central: bool) -> Path:
    """A curator's is beside the folder, which is made at the end alone: the times of a folder tell
    how long it took, and so how many runs.
    """
    if central:
        return folder.resolve().parent / f".{folder.resolve().name}.secret"
    return folder / "runs"


def open_hidden(hidden: Path) -> None:
    hidden.mkdir(mode=0o700, exist_ok=True)
    hidden.chmod(0o700)


def seed_of(hidden: Path, given: int | None, records: Records) -> int:
    """The seed of all noise in the folder, for these very records: the same noise on others would
    tell where they differ.
    """
    if not RunFolder(hidden).seed.exists() and any(hidden.glob("*.safetensors")):
        raise BadInput(
            f"{hidden} has runs but no longer their seed, so that they cannot be "
            "continued; choose another --out"
        )
    return kept_seed(RunFolder(hidden).seed, given, records)


def kept_seed(path: Path, given: int | None, records: Records) -> int:
    """The seed in the file, or a new one that it then holds, for these very records."""
    if path.exists():
        try:
            kept = json.loads(path.read_text())
            seed = int(kept["seed"])
            mark = str(kept["records"])
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
    """For a folder that is shown: under a key that stays with this user, and another each time, so
    that no two marks tell of a change.
    """
    salt = secrets.token_hex(16)
    return json.dumps({"salt": salt, "records": _mark(_own_key() + salt, records)}) + "\n"


def places_key(seed: int | None) -> str:
    """What gives persons their places in a held-out split: this user's secret, or a seed that was
    given, with which all noise is known anyway.
    """
    return f"places {_own_key() if seed is None else seed}"


def _own_key() -> str:
    registry = Registry()
    path = registry.folder.parent / KEY
    with registry.locked():
        if not path.exists():
            atomic.write(path, secrets.token_hex(32))
    return path.read_text()


def check_mark(folder: Path, records: Records) -> None:
    """BadInput unless the mark in the run's folder is of these very records, in this order."""
    key = Registry().folder.parent / KEY
    try:
        kept = json.loads(RunFolder(folder).record_mark.read_text())
        same = hmac.compare_digest(kept["records"], _mark(key.read_text() + kept["salt"], records))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"whether these are the records of the run in {folder} cannot be told "
            f"({type(error).__name__}): that needs its records.json "
            f"and the key {key} of whoever trained it; train again"
        ) from None
    if not same:
        raise BadInput(
            f"the records are not those with which the run in {folder} was trained, in "
            "their order, so that some that it has seen may be "
            "among those held out; restore them, or train again"
        )


def _mark(key: str, records: Records) -> str:
    mark = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for part in (records.x, records.y):
        mark.update(
            f"{part.dtype} {tuple(part.shape)} ".encode() + part.contiguous().numpy().tobytes()
        )
    return mark.hexdigest()


def renew(folder: Path) -> None:
    """An empty folder that was there before is made anew, later: it has its own date of birth."""
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def clean_up(folder: Path, hidden: Path, *, central: bool) -> None:
    """Once the answer is written: no seed, since known noise protects nobody.

    Of a curator nothing is kept of the runs that were not chosen, nor of how many there were: the
    theorem prices the best run alone.
    """
    if not central:
        RunFolder(hidden).seed.unlink(missing_ok=True)
        return
    when = RunFolder(folder).tuning.stat().st_mtime_ns
    if any(path.stat().st_mtime_ns != when for path in (*folder.iterdir(), folder)):
        for path in (*folder.iterdir(), folder):
            os.utime(
                path, ns=(when, when)
            )  # before the runs are deleted, which takes the longer the more there are
    if hidden.exists():
        shutil.rmtree(hidden)
