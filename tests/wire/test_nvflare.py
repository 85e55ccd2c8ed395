"""A real NVFlare server and three clients with mutual TLS on loopback; the gates are stand-ins that
give a frame back reversed.
"""

import contextlib
import datetime
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import weakref
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare_federation import PATIENCE, SILOS, until

from silodp.core.errors import BadInput
from silodp.host.frames import Frames
from silodp.wire.hub import Hub
from silodp.wire.nvflare import site
from silodp.wire.nvflare.app import FETCH, TOPIC, Courier, ServerHub
from silodp.wire.socket import CODES
from silodp.wire.sweep import PIECE, ROOM

pytestmark = pytest.mark.xdist_group("nvflare")  # one federation for all


@pytest.mark.parametrize("floats", [3_394, 1_000_000])
def test_each_silo_gets_its_own_frame_and_replies_come_back_intact(hub, floats):
    frames = {name: os.urandom(4 * floats) for name in SILOS}
    assert hub.names() == SILOS
    assert hub.exchange(frames, PATIENCE) == {name: frame[::-1] for name, frame in frames.items()}


def test_a_long_question_is_fetched_and_no_log_has_it(hub, folder):
    frames = dict.fromkeys(SILOS, bytes(range(256)) * 20_000)
    assert hub.exchange(frames, PATIENCE) == {name: frame[::-1] for name, frame in frames.items()}
    logs = [*folder.glob("*.log"), *(folder / "kits").rglob("*log*.txt")]
    assert len(logs) >= 2 * len(SILOS)
    assert [
        str(log) for log in logs if b"aux reply" in (text := log.read_bytes()) or len(text) > 1e6
    ] == []


def test_a_ticket_is_good_once_and_nothing_of_the_servers_but_a_ticket_goes_back(gates, tmp_path):
    hub, told = ServerHub(str(tmp_path / "hub"), str(tmp_path / "removed")), []
    courier, frame = Courier(str(gates["a"])), b"question" * 2**18

    class Server:
        def new_context(self):
            return contextlib.nullcontext(FLContext())

        def send_aux_request(self, targets, topic, request, timeout, fl_ctx, optional):
            told.append(sorted(request))
            return {"a": courier._carry(topic, request, Context())}

    class Client:
        def send_aux_request(self, topic, request, timeout, fl_ctx):
            told.append(topic)
            found, again = hub._give(topic, request, None), hub._give(topic, request, None)
            assert "frame" in found
            assert "frame" not in again
            return found

    class Context(FLContext):
        def get_engine(self):
            return Client()

    hub._engine = Server()
    assert hub._ask("a", Frames.of({"a": frame}), PATIENCE) == frame[::-1]
    assert told == [["__headers__", "ticket", "timeout"], FETCH]
    assert hub._offered == {}
    told.clear()
    for ticket in ("../secret", "0" * 33, "", 7, {"a": 1}, None):
        assert _carry(courier, ticket=ticket, timeout=1.0) == {"code": "malformed"}
        assert "frame" not in hub._give(FETCH, Shareable({"ticket": ticket}), None)
    assert told == []
    assert hub._ask("a", Frames.of({"a": b"short"}), PATIENCE) == b"trohs"
    assert told == [["__headers__", "frame", "timeout"]]
    assert hub._ask("a", Frames.of({"a": b"short"}), -1.0) is None


def test_what_the_engine_still_holds_of_sent_frames_has_a_bound(hub, folder):
    frames, watcher = dict.fromkeys(SILOS, bytes(2**22)), Hub(folder / "watcher.sock")
    for _ in range(10):  # 120 MiB, of which nothing else would be let go of
        watcher.exchange({"a": b"left"}, PATIENCE)
        assert sorted(hub.exchange(frames, PATIENCE)) == SILOS
    assert int(watcher.exchange({"a": b"left"}, PATIENCE)["a"]) < ROOM + 8 * 2**22


def test_a_courier_lets_go_of_what_lies_about(gates):
    class Half:
        def __init__(self):
            self.own = self

    courier, left = Courier(str(gates["a"])), weakref.ref(Half())
    gc.disable()
    try:
        for _ in range(ROOM // PIECE):
            assert _carry(courier, frame=b"frame", timeout=PATIENCE) == {"reply": b"emarf"}
    finally:
        gc.enable()
    assert left() is None


def test_a_silo_whose_gate_is_missing_is_the_only_one_missing(hub, gates):
    gates["b"].rename(gates["b"].with_suffix(".away"))
    assert sorted(hub.exchange(dict.fromkeys(SILOS, b"frame"), PATIENCE)) == ["a", "c"]
    gates["b"].with_suffix(".away").rename(gates["b"])
    assert sorted(hub.exchange(dict.fromkeys(SILOS, b"frame"), PATIENCE)) == SILOS


def test_a_slow_gate_delays_nobody_beyond_the_deadline(hub):
    _left_out(hub, {"a": b"sleep", "b": b"sleep", "c": b"frame"}, ["c"])


def test_an_unknown_silo_is_not_asked(hub):
    assert hub.exchange({"stranger": b"frame"}, PATIENCE) == {}


def test_a_killed_client_is_missed_until_it_runs_again(hub, folder):
    pid = json.loads((folder / "processes.json").read_text())["b"][0]
    os.killpg(pid, signal.SIGKILL)
    _left_out(hub, dict.fromkeys(SILOS, b"frame"), ["a", "c"])
    pids = site.restart_job(folder)
    assert pids["b"] != pid
    until(lambda: sorted(hub.exchange(dict.fromkeys(SILOS, b"frame"), 10.0)) == SILOS)


def test_a_killed_server_comes_back_at_the_same_hub_and_clients_return(hub, folder):
    before = json.loads((folder / "processes.json").read_text())
    os.killpg(before["server"][0], signal.SIGKILL)
    pids = site.restart_job(folder)
    assert {name: pids[name] for name in SILOS} == {
        name: before[name][0] for name in SILOS
    }  # they were not started again
    until(lambda: sorted(hub.exchange(dict.fromkeys(SILOS, b"frame"), 10.0)) == SILOS)


def test_the_settled_kit_gives_no_right_and_names_nothing_of_the_silo_but_the_socket(folder, gates):
    kit = folder / "kits" / "a"
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ["silodp.wire.nvflare.app.Courier"]
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert [part["path"] for part in resources["components"]] == ["silodp.wire.nvflare.app.Courier"]
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert all(
        set(role.values()) == {"none"} and "byoc" in role and "shell_commands" in role
        for role in rights.values()
    )
    assert len(rights) == 4
    settings = "".join(file.read_text() for file in (kit / "local").iterdir())
    assert settings.count(str(gates["a"].parent)) == settings.count(str(gates["a"])) == 1


def test_settling_drops_whatever_else_the_server_put_into_a_kit(folder, tmp_path):
    kit = tmp_path / "kit"
    shutil.copytree(folder / "kits" / "d", kit)
    (kit / "local" / "custom").mkdir()
    (kit / "local" / "custom" / "sitecustomize.py").write_text("wicked")
    (kit / "startup" / "extra__p_resources.json").write_text("{}")
    (kit / "startup" / "sub_start.sh").write_text("wicked")
    given = json.loads((kit / "startup" / "fed_client.json").read_text())
    (kit / "startup" / "fed_client.json").write_text(
        json.dumps(given | {"components": [{"id": "x", "path": "wicked.Thing"}]})
    )
    site.settle_silo(kit, Path("/run/gate.sock"))
    kept = sorted(str(file.relative_to(kit)) for file in kit.rglob("*") if file.is_file())
    assert kept == [
        *(
            "local/authorization.json",
            "local/comm_config.json",
            "local/log_config.json",
            "local/resources.json",
        ),
        *(
            "startup/client.crt",
            "startup/client.key",
            "startup/fed_client.json",
            "startup/rootCA.pem",
            "startup/sub_start.sh",
        ),
    ]
    assert not any("wicked" in file.read_text() for file in kit.rglob("*") if file.is_file())


def test_the_courier_says_a_fixed_word_and_never_the_text_of_an_exception(gates, monkeypatch):
    courier = Courier(str(gates["a"].parent / "nobody"))
    assert _carry(courier, frame=b"x", timeout=1.0) == {"code": "unreachable"}
    for wrong in (
        {},
        {"frame": "text", "timeout": 1.0},
        {"frame": b"x", "timeout": 1e9},
        {"frame": b"x", "timeout": float("nan")},
    ):
        assert _carry(courier, **wrong) == {"code": "malformed"}
    assert _carry(Courier(str(gates["a"]), limit=10), frame=b"x" * 11, timeout=1.0) == {
        "code": "size"
    }
    monkeypatch.setattr(courier, "_gate", None)  # an error that nobody foresaw
    assert _carry(courier, frame=b"x", timeout=1.0) == {"code": "courier"}
    assert {"unreachable", "size"} <= set(CODES)


def test_who_has_no_good_certificate_is_refused_and_the_sentence_says_why(folder, tmp_path, hub):
    good, other = folder / "kits" / "d", tmp_path / "other"
    site.provision(other, ["d"], port=1)
    assert site.explain(good).startswith("accepted")
    cases = {
        "none": "the client showed no certificate",
        "stranger": "wrong CA",
        "expired": "the client's certificate has expired",
    }
    for case, sentence in cases.items():
        shutil.copytree(good, tmp_path / case)
        startup = tmp_path / case / "startup"
        if case == "none":
            (startup / "client.crt").unlink()
        if case == "stranger":
            for file in ("client.crt", "client.key"):
                shutil.copy(other / "kits" / "d" / "startup" / file, startup / file)
        if case == "expired":
            _expire(startup / "client.crt", folder / "authority" / "silodp" / "state" / "cert.json")
        said = site.explain(tmp_path / case)
        assert said.startswith("refused: "), said
        assert sentence in said
    shutil.copytree(other / "kits" / "d", tmp_path / "elsewhere")
    wrong = tmp_path / "elsewhere" / "startup" / "fed_client.json"
    shutil.copy(good / "startup" / "fed_client.json", wrong)
    assert "the server's certificate" in site.explain(tmp_path / "elsewhere")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        given = json.loads(wrong.read_text())
        given["servers"][0]["service"]["target"] = f"127.0.0.1:{closed.getsockname()[1]}"
        wrong.write_text(json.dumps(given))
        assert site.explain(tmp_path / "elsewhere").startswith("unreachable")
    assert hub.names() == SILOS


def test_the_engine_itself_does_not_let_in_a_client_with_an_expired_certificate(
    folder, tmp_path, hub
):
    kit = tmp_path / "expired"
    shutil.copytree(folder / "kits" / "d", kit)
    site.settle_silo(kit, tmp_path / "gate.sock")
    _expire(kit / "startup" / "client.crt", folder / "authority" / "silodp" / "state" / "cert.json")
    with subprocess.Popen(
        site.command(kit),
        env=site.environment(kit),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as client:
        time.sleep(6.0)  # a good client needs less than 5
        present = hub.names()
        os.killpg(client.pid, signal.SIGKILL)
    assert present == SILOS


@pytest.mark.parametrize("names", [[], ["a", "a"], ["server"], ["../a"], ["A b"], ["x" * 64]])
def test_bad_names_are_refused(tmp_path, names):
    with pytest.raises(BadInput, match="must be"):
        site.provision(tmp_path / "f", names)


def _carry(courier, **content):
    answer = courier._carry(TOPIC, Shareable(content), None)
    return {word: said for word, said in answer.items() if word != "__headers__"}


def test_a_call_ends_though_a_byte_comes_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("silodp.wire.nvflare.app.BEYOND", 0.1)
    hub, courier = (
        ServerHub(str(tmp_path / "hub"), str(tmp_path / "removed")),
        Courier(str(tmp_path / "gate")),
    )

    contexts = FLContextManager(
        engine=None, identity_name="server", job_id="", public_stickers={}, private_stickers={}
    )
    with contexts.new_context() as first:
        first.set_prop(
            ReservedKey.RUN_ABORT_SIGNAL, Signal(), private=True, sticky=True
        )  # as the server has it

    class Engine:
        """As NVFlare's, which waits on while there is progress, until it is told to stop."""

        def new_context(self):
            return contexts.new_context()

        def send_aux_request(self, *words, **settings):
            (context,) = (word for word in words if isinstance(word, FLContext))
            until(lambda: context.get_run_abort_signal().triggered)
            return {}

    hub._engine = Engine()
    assert hub._ask("a", Frames.of({"a": b"frame"}), 0.1) is None
    with contexts.new_context() as later:
        assert not later.get_run_abort_signal().triggered, "only that call is ended"
    context = FLContext()
    context.get_engine = Engine
    assert (
        courier._carry(TOPIC, Shareable({"ticket": "0" * 32, "timeout": 0.1}), context)["code"]
        == "malformed"
    )


def _left_out(hub, frames, present):
    """Those who are present reply, and no other delays the exchange beyond its time; on a busy
    machine they may need more of it.
    """
    timeout, answered = 1.5, []
    while answered != present:
        began = time.monotonic()
        answered = sorted(hub.exchange(frames, timeout))
        assert time.monotonic() - began < timeout + 60
        assert set(answered) <= set(present)
        timeout *= 2
        assert timeout < PATIENCE


def _expire(certificate, authority):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    state = json.loads(authority.read_text())
    key = serialization.load_pem_private_key(state["root_pri_key"].encode(), None)
    old, day = x509.load_pem_x509_certificate(certificate.read_bytes()), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    made = made.not_valid_before(datetime.datetime.now(datetime.UTC) - 2 * day).not_valid_after(
        datetime.datetime.now(datetime.UTC) - day
    )
    for extension in old.extensions:
        made = made.add_extension(extension.value, extension.critical)
    certificate.write_bytes(
        made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
