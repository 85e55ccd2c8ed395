"""A power cut at every step of an answer: the ledger's system calls are recorded, and replayed on
simulated disks up to each of them.

On such a disk only what was synced is sure to be there: contents by fsync of the file, names by
fsync of its folder; anything later may be there or not, in any mixture of sectors. Runs with
SILODP_LONG set and strace installed; it takes about a minute.
"""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from silodp.silo.ledger.durable import DurableLedger

pytestmark = pytest.mark.skipif(
    "SILODP_LONG" not in os.environ or not shutil.which("strace"),
    reason="long; needs SILODP_LONG=1 and strace",
)

CALLS = "openat,write,pwrite64,fsync,fdatasync,unlink,rename,ftruncate"
QUERY = {"digest": bytes(32), "kind": "grad", "asker": "server", "run": "run", "generation": 0}
GATE = """
import os, sys
from pathlib import Path
import numpy as np
from silodp.core.privacy.accounting import GDP, Budget
from silodp.core.events import Event
from silodp.core.sampling import FullBatch
from silodp.silo.ledger.durable import DurableLedger, Identity

act, folder, anchor = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if act == "make":
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
    DurableLedger.create(folder / "ledger", rule=GDP(), budget=Budget(3.0, 1e-5), records=20, identity=Identity.of(x, y), anchor=anchor)
    sys.exit()
ledger = DurableLedger.open(folder / "ledger")
marks = os.open(folder.parent.parent / "marks", os.O_WRONLY | os.O_CREAT)
os.write(marks, b"start")
for k in range(2):
    asked = ledger.for_query(query_id=f"q{k}", digest=bytes(32), kind="grad", asker="server", run="run", generation=0)
    asked.charge(Event(FullBatch(), 10.0), [0])
    os.write(marks, b"read q%d" % k)
    answer = asked.store(os.urandom(2000))
    os.write(marks, b"sent q%d %s" % (k, answer.hex().encode()))
"""  # noqa: E501


class File:
    def __init__(self, content: bytes = b"") -> None:
        self.now, self.synced = bytearray(content), content

    def torn(self, coin: random.Random) -> bytes:
        """Each sector old or new, and the length of either."""
        size = len(coin.choice([self.now, self.synced]))
        sectors = (
            bytes(coin.choice([self.now, self.synced])[k : k + 512]).ljust(512, b"\0")
            for k in range(0, size, 512)
        )
        return b"".join(sectors)[:size]


class Disk:
    """Names and contents, as they are and as they are sure to be after a power cut."""

    def __init__(self, root: Path) -> None:
        self.root = f"{root}/"
        self.names = {
            str(p.relative_to(root)): File(p.read_bytes()) for p in root.rglob("*") if p.is_file()
        }
        self.synced = dict(self.names)

    def call(self, name: str, path: str, *rest) -> bool:
        """Does what the system call did; whether it was to this disk."""
        if not f"{path}/".startswith(self.root):
            return False
        path = path[len(self.root) :]
        file = self.names.get(path)
        match name, rest:
            case "openat", (flags,) if "O_CREAT" not in flags:
                return False
            case "openat", (flags,):
                file = self.names.setdefault(path, File())
                file.now = file.now if "O_TRUNC" not in flags else bytearray()
            case (("pwrite64" | "write"), (content, offset)):
                at = offset if offset is not None else len(file.now)
                file.now.extend(bytes(max(0, at + len(content) - len(file.now))))
                file.now[at : at + len(content)] = content
            case (("fsync" | "fdatasync"), ()) if file:
                file.synced = bytes(file.now)
            case (("fsync" | "fdatasync"), ()):
                inside = {n for n in {*self.names, *self.synced} if os.path.dirname(n) == path}
                self.synced = {n: f for n, f in self.synced.items() if n not in inside} | {
                    n: f for n, f in self.names.items() if n in inside
                }
            case "unlink", ():
                del self.names[path]
            case "rename", (new,):
                self.names[new[len(self.root) :]] = self.names.pop(path)
            case "ftruncate", (size,):
                file.now = bytearray(bytes(file.now[:size]).ljust(size, b"\0"))
        return True

    def images(self, coin: random.Random):
        for names in (self.names, self.synced):
            yield {name: file.synced for name, file in names.items()}
            yield {name: bytes(file.now) for name, file in names.items()}
            for _ in range(3):
                yield {name: file.torn(coin) for name, file in names.items()}


def recorded(log: Path):
    """(call, path, ...) of each successful system call."""
    for line in log.read_text().splitlines():
        if not (match := re.match(r"(?:\d+ +)?(\w+)\((.*)\) += +\d+", line)):
            continue
        call, args = match.groups()
        texts = [
            bytes.fromhex(text.replace("\\x", ""))
            for text in re.findall(r'["<]((?:\\x[0-9a-f]{2})+)[">]', args)
        ]
        if call == "openat":
            yield call, texts[-1].decode(), args
        elif call in ("write", "pwrite64") and len(texts) == 2:
            yield (
                call,
                texts[0].decode(),
                texts[1],
                int(args.rsplit(", ", 1)[1]) if call == "pwrite64" else None,
            )
        elif call in ("fsync", "fdatasync", "unlink"):
            yield call, texts[0].decode()
        elif call == "rename":
            yield call, texts[0].decode(), texts[1].decode()
        elif call == "ftruncate":
            yield call, texts[0].decode(), int(args.rsplit(", ", 1)[1])


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_a_power_cut_at_any_step_undoes_no_charge_behind_an_answer_and_loses_no_answer(
    tmp_path, monkeypatch, place
):
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    root = tmp_path / "disk"
    for folder in ("beside", "elsewhere"):
        (root / folder).mkdir(parents=True)
    gate = [sys.executable, "-c", GATE]
    where = [str(root / "beside"), str(root / place / "anchor")]
    subprocess.run([*gate, "make", *where], check=True)
    disk, marks, cuts, coin = Disk(root), [], 0, random.Random(5)
    trace = [
        "strace",
        "-f",
        "-y",
        "-xx",
        "-s",
        "100000",
        "-o",
        str(tmp_path / "log"),
        "-e",
        f"trace={CALLS}",
    ]
    subprocess.run([*trace, *gate, "answer", *where], check=True)
    for call, path, *rest in recorded(tmp_path / "log"):
        if path == str(tmp_path / "marks") and call == "write":
            marks.append(rest[0].decode().split())
        elif marks and disk.call(call, path, *rest):
            cuts += 1
            for image in disk.images(coin):
                shutil.rmtree(root)
                for name, content in image.items():
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).write_bytes(content)
                ledger = DurableLedger.open(root / "beside" / "ledger")
                ledger.verify()
                assert {mark[1] for mark in marks if mark[0] == "read"} <= {
                    e.query_id for e in ledger.entries()
                }
                for _, query_id, answer in (mark for mark in marks if mark[0] == "sent"):
                    assert ledger.for_query(query_id=query_id, **QUERY).answer == bytes.fromhex(
                        answer
                    )
    assert [mark[0] for mark in marks] == ["start", "read", "sent", "read", "sent"]
    assert cuts > 80
