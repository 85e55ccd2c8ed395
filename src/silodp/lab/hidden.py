"""The part of a tuning's folder that nobody but the tuning itself may read: its seed, a mark of its records, and runs that are not chosen."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.silo.atomic import write_atomically
from silodp.silo.records import Records


def open_hidden(hidden: Path) -> None:
    hidden.mkdir(mode=0o700, exist_ok=True)
    hidden.chmod(0o700)


def seed_of(hidden: Path, given: int | None, records: Records) -> int:
    """The seed of all noise in the folder, for these very records: the same noise on others would tell where they differ."""
    path = hidden / "seed"
    if path.exists():
        kept = json.loads(path.read_text())
        if not hmac.compare_digest(kept["records"], _mark(kept["seed"], records)):
            raise BadInput(f"the records are not those with which {hidden.parent} was begun; restore them, or choose another --out")
        return kept["seed"]
    if any(hidden.glob("*.safetensors")):
        raise BadInput(f"{hidden.parent} has runs but no longer their seed, so that they cannot be continued; choose another --out")
    seed = secrets.randbits(128) if given is None else given
    write_atomically(path, json.dumps({"seed": seed, "records": _mark(seed, records)}))
    return seed


def _mark(seed: int, records: Records) -> str:
    mark = hmac.new(str(seed).encode(), digestmod=hashlib.sha256)
    for part in (records.x, records.y):
        mark.update(f"{part.dtype} {tuple(part.shape)} ".encode() + part.contiguous().numpy().tobytes())
    return mark.hexdigest()


def clean_up(folder: Path, *, central: bool) -> None:
    """Once the answer is written: no seed, since known noise protects nobody.

    A curator's folder keeps nothing of the runs that were not chosen, nor of how many there were: the theorem prices the best run alone.
    All files then have one time, since the first and the last would say how long it took.
    """
    if not central:
        (folder / "runs/seed").unlink(missing_ok=True)
        return
    if (folder / "secret").exists():
        shutil.rmtree(folder / "secret")
    when = (folder / "tune.json").stat().st_mtime_ns
    if any(path.stat().st_mtime_ns != when for path in folder.iterdir()):
        write_atomically(folder / "config.json", (folder / "config.json").read_text())  # a new file: an old one keeps its date of birth
        for path in (*folder.iterdir(), folder):
            os.utime(path, ns=(when, when))
