"""The shuffler as a process: a courier's socket, the commands, SIGTERM, and kill -9 at any instant.

SILODP_LONG=200 makes the random kill -9 loop as long as that.
"""

import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mixing import ROSTER, ROUND, SEAL, SERVER, SIGN, box, door, frame, outcome
from silodp.cli import app as cli
from silodp.core.errors import BadInput
from silodp.core.protocol.relay import DECLINED, Declined, Passed, decode_outcome
from silodp.host.keys import public
from silodp.host.listener import LINE_CODES
from silodp.shuffler import daemon
from silodp.shuffler import store as store_module
from silodp.shuffler.provision import COMMENTS, provision
from silodp.shuffler.settings import ShufflerSettings
from silodp.shuffler.store import RoundStore
from silodp.wire.socket import Socket, Unreached

PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well
KEYS = {"seal": public(SEAL), "sign": public(SIGN)}

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["pytest", "mixing", "silodp.cli.app", "silodp.shuffler.daemon", "silodp.shuffler.provision"]
)


def made(folder: Path, **changes) -> tuple[Path, dict[str, str]]:
    card = provision(folder / "mixer", askers=[public(SERVER)], members=ROSTER, **changes)
    return folder / "mixer" / "shuffler.toml", card


def serve(path: Path) -> None:
    stop, tell = socket.socketpair()
    with stop, tell:
        daemon.serve(path, stop, lambda settings: None)


def started(path: Path):
    process = processes.Process(target=serve, args=(path,), daemon=True)
    process.start()
    return process


def boxes_for(card: dict[str, str], round: str, members=range(3)) -> list[bytes]:
    return [box(i, round, key=card["seal"]) for i in members]


# --- the process ---------------------------------------------------------------------------------


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "silodp.cli", "federation", "shuffler", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_init_serve_ask_status_stop(tmp_path):
    """The commands as an operator types them, and a courier at the socket; what was passed on stays
    so after a restart.
    """
    members = [word for name in ROSTER for word in ("--member", name)]
    made = run("init", tmp_path / "m", "--asker", public(SERVER), *members, "--json")
    card, path = json.loads(made.stdout), tmp_path / "m" / "shuffler.toml"
    assert json.loads((tmp_path / "m" / "shuffler.json").read_text()) == card
    assert {
        p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "m").iterdir()
    } == dict.fromkeys(
        ["shuffler.toml", "seal.key", "sign.key", "rounds.db", "shuffler.json"], 0o600
    )
    settings, boxes = ShufflerSettings.load(path), boxes_for(card, ROUND, range(4))
    replies = []
    for sent in (boxes, boxes[:3]):
        with subprocess.Popen(
            [sys.executable, "-m", "silodp.cli", "federation", "shuffler", "serve", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == f"the shuffler answers at {settings.socket}\n"
            line = Socket(settings.socket)
            replies.append(line.ask(frame(*sent), PATIENCE))
            junk = decode_outcome(
                line.ask(b"junk", PATIENCE), limit=10**4, shuffler_key=card["sign"]
            )
            assert junk == Declined("malformed")
            if len(replies) == 1:
                told = json.loads(run("status", path, "--json").stdout)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            assert process.stderr.read() == ""
        with pytest.raises(Unreached, match="unreachable"):
            Socket(settings.socket).ask(b"", 1.0)
    assert replies[0] == replies[1]
    passed = decode_outcome(replies[0], limit=10**4, shuffler_key=card["sign"])
    assert isinstance(passed, Passed)
    assert passed.contributions == 4
    expected = {
        "running": True,
        "socket": settings.socket,
        "members": len(ROSTER),
        "passed": 1,
        "repeated": 0,
        "declined": {"malformed": 1},
    }
    assert told == expected | card
    words = [re.sub(r"^\S+ ", "", line) for line in Path(settings.log).read_text().splitlines()]
    assert words == [
        f"started    {len(ROSTER)} members, 0 rounds passed on so far",
        f"passed     round {ROUND[:16]} boxes 4 dropped 0",
        "malformed  round - boxes 0 dropped 0",
        "stopped",
        f"started    {len(ROSTER)} members, 1 rounds passed on so far",
        f"repeated   round {ROUND[:16]} boxes 3 dropped 0",
        "malformed  round - boxes 0 dropped 0",
        "stopped",
    ]


def silodp(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["silodp", "federation", "shuffler", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_nothing_is_written_over_and_what_is_wrong_is_said_in_a_sentence(
    folder, monkeypatch, capsys
):
    path, card = made(folder)
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    options = ["--asker", public(SERVER), "--member", ROSTER[0], "--member", ROSTER[1]]
    code, out, err = silodp(monkeypatch, capsys, "init", path.parent, *options)
    assert (code, out) == (2, "")
    assert "does not overwrite files" in err
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before
    for words, why in (
        (["--asker", "no", *options[2:]], "askers is 'no'"),
        (["--asker", public(SERVER), "--member", ROSTER[0]], "roster is"),
        ([*options[:4], "--member", ROSTER[0]], "roster has a key twice"),
    ):
        code, out, err = silodp(monkeypatch, capsys, "init", folder / "new", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert why in err
        assert not (folder / "new").exists()
    code, out, err = silodp(monkeypatch, capsys, "status", path)
    assert (code, err) == (0, "")
    assert "does not run" in out
    assert card["seal"] in out


def test_a_shuffler_is_made_before_its_members_and_does_not_serve_without_them(
    folder, monkeypatch, capsys
):
    """Silos need its key to have pseudonyms, so it comes first."""
    code, out, _ = silodp(monkeypatch, capsys, "init", folder / "m", "--asker", public(SERVER))
    assert code == 0
    assert "no members yet" in out
    path = folder / "m/shuffler.toml"
    code, _, err = silodp(monkeypatch, capsys, "serve", path)
    assert code == 2
    assert "roster is ()" in err
    path.write_text(path.read_text().replace("roster = []", f"roster = {json.dumps(ROSTER)}"))
    assert ShufflerSettings.load(path).roster == tuple(ROSTER)


def test_the_settings_have_every_field_with_a_comment_and_no_other(folder):
    path, _ = made(folder)
    text = path.read_text()
    names = re.findall(r"^(\w+) = ", text, re.M)
    assert set(names) == set(COMMENTS)
    for name in names:
        path.write_text(re.sub(rf"^{name} = .*$", "", text, flags=re.M))
        with pytest.raises(BadInput, match=f"the field '{name}' is missing"):
            ShufflerSettings.load(path)
        path.write_text(re.sub(rf"^{name} = .*$", f"{name} = -1.5", text, flags=re.M))
        with pytest.raises(BadInput, match=f"settings: {name} is"):
            ShufflerSettings.load(path)
    path.write_text(f"{text}\nsilo = 'clinic'\n")
    with pytest.raises(BadInput, match="'silo' is unknown"):
        ShufflerSettings.load(path)


def test_keys_that_others_can_read_another_store_and_a_second_process_are_refused(folder):
    path, card = made(folder)
    settings = ShufflerSettings.load(path)
    for name in ("seal_key", "sign_key", "store"):
        os.chmod(getattr(settings, name), 0o644)
        with pytest.raises(BadInput, match="has mode 0644"):
            serve(path)
        os.chmod(getattr(settings, name), 0o600)
    key = Path(settings.seal_key).read_text()
    Path(settings.seal_key).write_text("11" * 32)
    with pytest.raises(BadInput, match="made with other keys"):
        serve(path)
    Path(settings.seal_key).write_text("11" * 31)
    with pytest.raises(BadInput, match="64 hexadecimal digits"):
        serve(path)
    Path(settings.seal_key).write_text(key)
    process = started(path)
    asked(settings, frame(*boxes_for(card, ROUND)))
    with pytest.raises(BadInput, match="another daemon serves the store"):
        serve(path)
    process.kill()
    process.join(PATIENCE)
    Path(settings.store).unlink()
    with pytest.raises(BadInput, match="there is no store"):
        serve(path)


def test_every_code_of_the_line_is_one_that_a_shuffler_can_sign():
    assert set(LINE_CODES) <= set(DECLINED)
    assert all(text.endswith(".") for text in DECLINED.values())


def asked(settings: ShufflerSettings, sent: bytes) -> bytes:
    """The reply, however long the process takes to listen."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return Socket(settings.socket).ask(sent, PATIENCE)
        except Unreached:
            assert time.monotonic() < deadline
            time.sleep(0.005)


# --- kill -9 -------------------------------------------------------------------------------------


def die_before(path: Path, step: int, sent: bytes, log: Path) -> None:
    """A door that is killed before the given step of its store, and writes what it sends where kill
    -9 cannot take it back.
    """
    store, steps, connect = RoundStore(path, **KEYS), itertools.count(), sqlite3.connect

    def before() -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    class Watched(sqlite3.Connection):
        def execute(self, sql, *rest):
            before()
            try:
                return super().execute(sql, *rest)
            finally:
                before()

    store_module.sqlite3.connect = lambda *args, **options: connect(
        *args, factory=Watched, **options
    )
    reply = door(store).handle(sent)
    before()
    log.write_bytes(reply)
    before()


def test_killed_before_and_after_any_step_a_round_has_one_total_and_none_that_was_sent_is_lost(
    folder,
):
    (folder / "rounds.db").touch(0o600)
    store = RoundStore.create(folder / "rounds.db", **KEYS)
    fates = []
    for step in itertools.count():
        round, log = f"{step:064x}", folder / f"log{step}"
        boxes = [box(i, round) for i in range(4)]
        process = processes.Process(
            target=die_before, args=(folder / "rounds.db", step, frame(*boxes, round=round), log)
        )
        process.start()
        process.join(PATIENCE)
        stored = store.reply(round)
        later = door(store).handle(frame(*boxes[:3], round=round))
        assert isinstance(outcome(later), Passed)
        if log.exists():
            assert log.read_bytes() == stored
        if stored is not None:
            assert later == stored
        fates.append((stored is not None, log.exists()))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert [fate for fate, _ in itertools.groupby(fates)] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert len(fates) > 20


def test_kill_9_at_random_instants_never_passes_on_two_totals_of_a_round(tmp_path):
    """A server asks about each round again and again, each time with other boxes, while the
    shuffler dies and comes back.
    """
    path, card = made(tmp_path, rounds_per_hour=10**6)
    settings, generator, over = ShufflerSettings.load(path), random.Random(4), threading.Event()
    times, kills = int(os.environ.get("SILODP_LONG", "15")), 0
    shelf = {f"{k:064x}": boxes_for(card, f"{k:064x}", range(5)) for k in range(3 * times)}
    seen: dict[str, set[bytes]] = {round: set() for round in shelf}
    failures: list[Exception] = []
    names = list(shelf)

    def server(seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not over.is_set():
                round = choose.choice(names[: 1 + len(names) * kills // times])
                sent = frame(*choose.sample(shelf[round], choose.randint(3, 5)), round=round)
                try:
                    reply = decode_outcome(
                        raw := Socket(settings.socket).ask(sent, PATIENCE),
                        limit=10**5,
                        shuffler_key=card["sign"],
                    )
                except Unreached:
                    time.sleep(0.002)
                    continue
                if isinstance(reply, Passed):
                    seen[round].add(raw)
        except Exception as error:  # shown by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=server, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        while kills < times:
            process = started(path)
            asked(settings, frame(*shelf[names[0]], round=names[0]))
            time.sleep(generator.uniform(0, 0.1))
            process.kill()
            process.join(PATIENCE)
            assert process.exitcode == -signal.SIGKILL
            kills += 1  # and with it the rounds that are asked about
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not failures
    store = RoundStore(Path(settings.store), **card)
    assert max(map(len, seen.values())) == 1, "one reply a round, whatever the boxes"
    for round, replies in seen.items():
        assert replies <= {store.reply(round)}
    print(
        f"\n{times} kills: {sum(map(len, seen.values()))} of {len(shelf)} rounds passed "
        f"on, {store.since(0)} stored"
    )
    assert sum(map(len, seen.values())) > 2
