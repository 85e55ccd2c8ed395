"""A real NVFlare server and three clients with mutual TLS on loopback; the gates are stand-ins that give a frame back reversed."""

import contextlib
import datetime
import gc
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from silodp.core.errors import BadInput
from silodp.host.frames import Frames
from silodp.wire.hub import Hub, serve_hub
from silodp.wire.nvflare import kits, site
from silodp.wire.nvflare.app import FETCH, TOPIC, Courier, ServerHub
from silodp.wire.site import group_runs
from silodp.wire.socket import CODES
from silodp.wire.sweep import PIECE, ROOM

pytestmark = pytest.mark.xdist_group("nvflare")  # one federation for all

SILOS, MODIFIED = ["a", "b", "c"], ["x0", "x1", "x2"]
PATIENCE = 600.0  # to end a test that hangs; nothing waits so long when all is well
GATE = """
import os, socket, sys, threading, time
def whole(line, size):
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
def serve(line):
    with line:
        frame = whole(line, int.from_bytes(whole(line, 4), "big"))
        if frame.startswith(b"sleep"):
            time.sleep(3600)
            return
        line.sendall(len(frame).to_bytes(4, "big") + frame[::-1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(16)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class ModifiedServer(FLComponent):
    """What a server that does not keep to NVFlare's rules can send: an admin command that asks the client not to check any right."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def handle_event(self, event_type, fl_ctx):
        if event_type == EventType.SYSTEM_START:
            self.cell = fl_ctx.get_engine().cell
            threading.Thread(target=serve_hub, args=(self.path, self.attack, list, threading.Event()), daemon=True).start()

    def attack(self, frames, timeout):
        from nvflare.private.admin_defs import Message
        from nvflare.private.defs import CellChannel, new_cell_message

        found = {}
        for name, frame in frames.items():
            topic, _, body = frame.decode().partition(" ")
            if topic == "left":
                found[name] = str(self.left()).encode()
                continue
            if topic.startswith("net:"):
                found[name] = self.network_command(topic.removeprefix("net:"), name, body, timeout)
                continue
            request = new_cell_message({}, Message(topic=topic, body=body))
            reply = self.cell.send_request(CellChannel.CLIENT_MAIN, topic, name, request, timeout)
            found[name] = str(getattr(reply.payload, "body", reply.payload)).encode()
        return found

    def left(self) -> int:
        """Bytes of sent messages that the engine still holds; from now on Python looks for none of them by itself."""
        from nvflare.fuel.f3.streaming.byte_streamer import TxTask

        gc.disable()
        return sum(task.stream.get_size() + len(task.buffer) for task in gc.get_objects() if isinstance(task, TxTask))

    def network_command(self, topic, name, path, timeout) -> bytes:
        """A command of the network under the engine; with a path, its content is a Datum, which the engine reads when it sends it back."""
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
        from nvflare.fuel.f3.message import Message

        request = Message(payload=_datum(path) if path else None)
        if path:
            request.set_header(MessageHeaderKey.PAYLOAD_ENCODING, "fobs")
        reply = self.cell.core_cell.send_request("_net_manager", topic, name, request, timeout)
        payload = reply.payload
        if isinstance(payload, dict) and hasattr(payload.get("x"), "value"):
            payload = Path(payload["x"].value).read_bytes()  # where the engine has put what it got
        return payload if isinstance(payload, bytes) else f"{reply.headers}".encode()


class ModifiedSilo(FLComponent):
    """What a silo that does not keep to NVFlare's rules can send to the server: beginnings of streams, with whatever size they claim."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def handle_event(self, event_type, fl_ctx):
        if event_type == EventType.SYSTEM_START:
            self.cell = fl_ctx.get_engine().cell
            threading.Thread(target=serve_hub, args=(self.path, self.attack, list, threading.Event()), daemon=True).start()

    def attack(self, frames, timeout):
        from nvflare.fuel.f3.message import Message
        from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamDataType, StreamHeaderKey

        channel, encoding, count, size = frames["x"].decode().split()
        for number in range(int(count)):
            headers = {
                StreamHeaderKey.CHANNEL: channel, StreamHeaderKey.TOPIC: FETCH, StreamHeaderKey.SIZE: int(size), StreamHeaderKey.OFFSET: 0,
                StreamHeaderKey.STREAM_ID: time.monotonic_ns(), StreamHeaderKey.SEQUENCE: 0, StreamHeaderKey.DATA_TYPE: StreamDataType.CHUNK,
                StreamHeaderKey.STREAM_REQ_ID: f"{number}", StreamHeaderKey.PAYLOAD_ENCODING: encoding,
            }  # fmt: skip
            self.cell.core_cell.fire_and_forget(STREAM_CHANNEL, STREAM_DATA_TOPIC, "server", Message(headers, b"x"))
        return {"x": b"sent"}


def _datum(path: str) -> bytes:
    import msgpack
    from nvflare.fuel.utils.fobs import lobs
    from nvflare.fuel.utils.fobs.decomposer import DATA_CONTENT

    fields = {"datum_id": "12345678-1234-1234-1234-123456789abc", "datum_type": 9, "dot": 0, "value": path}
    kind = {"__fobs_type__": "nvflare.fuel.utils.fobs.datum.Datum", "__fobs_dc__": "nvflare.fuel.utils.fobs.decomposer.DataClassDecomposer"}
    body = msgpack.packb({"x": kind | {"__fobs_data__": {DATA_CONTENT: fields}}})
    return lobs._Header(lobs.MARKER_MAIN, 0, len(body)).to_bytes() + body


@pytest.fixture(scope="module")
def gates(tmp_path_factory):
    place, started = tmp_path_factory.mktemp("gates"), {}
    for name in SILOS:
        started[name] = subprocess.Popen([sys.executable, "-c", GATE, str(place / name)])
    yield {name: place / name for name in SILOS}
    for gate in started.values():
        gate.kill()
        gate.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, gates):
    folder = tmp_path_factory.mktemp("fed") / "f"
    site.provision(folder, [*SILOS, "d", *MODIFIED])
    resources = folder / "kits" / "server" / "local" / "resources.json"
    settings = json.loads(resources.read_text())
    spy = {"id": "modified", "path": "test_nvflare.ModifiedServer", "args": {"path": str(folder / "modified.sock")}}
    settings["components"].append(spy)
    resources.write_text(json.dumps(settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        site.start(folder, gates)
        yield folder
        pids = [pid for pid, _ in json.loads((folder / "processes.json").read_text()).values()]
        site.stop(folder)
    assert not any(group_runs(pid) for pid in pids)
    assert not (folder / "hub.sock").exists()


@pytest.fixture
def modified_silo(request, folder, gates, hub):
    """One more silo, whose engine says what it is told. Each test has its own: what one has begun keeps it from being heard for a minute."""
    kit = folder / "kits" / request.param
    site.settle_silo(kit, gates["a"])
    resources = kit / "local" / "resources.json"
    settings = json.loads(resources.read_text()) | {"class_list_enforcement_mode": "off"}
    settings["components"].append({"id": "modified", "path": "test_nvflare.ModifiedSilo", "args": {"path": str(kit / "x.sock")}})
    resources.write_text(json.dumps(settings))
    client = subprocess.Popen(site.command(kit), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _until(lambda: (kit / "x.sock").exists() and request.param in hub.names())
        yield Hub(kit / "x.sock")
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.wait()
        (kit / "x.sock").unlink(missing_ok=True)
    _until(lambda: hub.names() == SILOS)


@pytest.fixture
def hub(folder):
    return Hub(folder / "hub.sock")


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
    assert [str(log) for log in logs if b"aux reply" in (text := log.read_bytes()) or len(text) > 1e6] == []


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


def test_a_courier_that_knows_no_tickets_is_sent_the_frame_itself(tmp_path):
    hub, frame = ServerHub(str(tmp_path / "hub"), str(tmp_path / "removed")), bytes(2**21)

    class Server:
        def new_context(self):
            return contextlib.nullcontext(FLContext())

        def send_aux_request(self, targets, topic, request, timeout, fl_ctx, optional):
            return {"a": {"reply": request["frame"]} if "frame" in request else {"code": "malformed"}}

    hub._engine = Server()
    assert hub._ask("a", Frames.of({"a": frame}), PATIENCE) == frame


def test_what_the_engine_still_holds_of_sent_frames_has_a_bound(hub, folder):
    frames, modified = dict.fromkeys(SILOS, bytes(2**22)), _modified(folder)
    for _ in range(10):  # 120 MiB, of which nothing else would be let go of
        modified.exchange({"a": b"left"}, PATIENCE)
        assert sorted(hub.exchange(frames, PATIENCE)) == SILOS
    assert int(modified.exchange({"a": b"left"}, PATIENCE)["a"]) < ROOM + 8 * 2**22


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
    _until(lambda: sorted(hub.exchange(dict.fromkeys(SILOS, b"frame"), 10.0)) == SILOS)


def test_a_killed_server_comes_back_at_the_same_hub_and_clients_return(hub, folder):
    before = json.loads((folder / "processes.json").read_text())
    os.killpg(before["server"][0], signal.SIGKILL)
    pids = site.restart_job(folder)
    assert {name: pids[name] for name in SILOS} == {name: before[name][0] for name in SILOS}  # they were not started again
    _until(lambda: sorted(hub.exchange(dict.fromkeys(SILOS, b"frame"), 10.0)) == SILOS)


@pytest.mark.parametrize("attack", ["sys.shell cat {secret}", "sys.shell ls {place}", "train.deploy x", "sys.info x", "train.start_job x"])
def test_a_modified_server_finds_no_command_that_the_silo_obeys(folder, tmp_path, attack):
    secret = tmp_path / "secret.txt"
    secret.write_text("needle")
    wicked = attack.format(secret=secret, place=tmp_path)
    said = _modified(folder).exchange({"a": wicked.encode()}, PATIENCE)["a"]
    assert b"invalid_request" in said
    assert b"needle" not in said
    assert b"secret.txt" not in said


def test_a_job_with_code_of_its_own_does_not_run_at_a_silo(folder, tmp_path):
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    config, custom, mark = tmp_path / "job" / "app" / "config", tmp_path / "job" / "app" / "custom", tmp_path / "ran"
    config.mkdir(parents=True)
    custom.mkdir()
    (custom / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    runs = {"format_version": 2, "executors": [{"tasks": ["x"], "executor": {"path": "mine.Mine", "args": {}}}], "components": []}
    (config / "config_fed_client.json").write_text(json.dumps(runs))
    (config / "config_fed_server.json").write_text(json.dumps({"format_version": 2, "workflows": [], "components": []}))
    meta = {"name": "job", "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["a"]}}
    (tmp_path / "job" / "meta.json").write_text(json.dumps(meta))
    session = new_secure_session(kits.ADMIN, str(folder / "kits" / kits.ADMIN), timeout=PATIENCE)
    try:
        session.submit_job(str(tmp_path / "job"))
        time.sleep(3.0)
    except Exception as refused:  # the server may refuse it first, which is no concern of the silo's
        print(refused)
    finally:
        session.close()
    assert not mark.exists()
    assert not [
        entry for entry in (folder / "kits" / "a").iterdir() if entry.is_dir() and entry.name not in ("startup", "local", "transfer")
    ]


def test_the_settled_kit_gives_no_right_and_names_nothing_of_the_silo_but_the_socket(folder, gates):
    kit = folder / "kits" / "a"
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == ["silodp.wire.nvflare.app.Courier"]
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert [part["path"] for part in resources["components"]] == ["silodp.wire.nvflare.app.Courier"]
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]
    assert all(set(role.values()) == {"none"} and "byoc" in role and "shell_commands" in role for role in rights.values())
    assert len(rights) == 4
    settings = "".join(file.read_text() for file in (kit / "local").iterdir())
    assert settings.count(str(gates["a"].parent)) == settings.count(str(gates["a"])) == 1


def test_settling_drops_whatever_else_the_server_put_into_a_kit(folder, tmp_path):
    kit = tmp_path / "kit"
    shutil.copytree(folder / "kits" / "d", kit)
    (kit / "local" / "custom").mkdir()
    (kit / "local" / "custom" / "sitecustomize.py").write_text("wicked")
    (kit / "startup" / "extra__p_resources.json").write_text("{}")
    given = json.loads((kit / "startup" / "fed_client.json").read_text())
    (kit / "startup" / "fed_client.json").write_text(json.dumps(given | {"components": [{"id": "x", "path": "wicked.Thing"}]}))
    site.settle_silo(kit, Path("/run/gate.sock"))
    kept = sorted(str(file.relative_to(kit)) for file in kit.rglob("*") if file.is_file())
    assert kept == [
        *("local/authorization.json", "local/comm_config.json", "local/log_config.json", "local/resources.json"),
        *("startup/client.crt", "startup/client.key", "startup/fed_client.json", "startup/rootCA.pem"),
    ]
    assert "wicked" not in (kit / "startup" / "fed_client.json").read_text()


def test_the_courier_says_a_fixed_word_and_never_the_text_of_an_exception(gates, monkeypatch):
    courier = Courier(str(gates["a"].parent / "nobody"))
    assert _carry(courier, frame=b"x", timeout=1.0) == {"code": "unreachable"}
    for wrong in ({}, {"frame": "text", "timeout": 1.0}, {"frame": b"x", "timeout": 1e9}, {"frame": b"x", "timeout": float("nan")}):
        assert _carry(courier, **wrong) == {"code": "malformed"}
    assert _carry(Courier(str(gates["a"]), limit=10), frame=b"x" * 11, timeout=1.0) == {"code": "size"}
    monkeypatch.setattr(courier, "_gate", None)  # an error that nobody foresaw
    assert _carry(courier, frame=b"x", timeout=1.0) == {"code": "courier"}
    assert {"unreachable", "size"} <= set(CODES)


def test_who_has_no_good_certificate_is_refused_and_the_sentence_says_why(folder, tmp_path, hub):
    good, other = folder / "kits" / "d", tmp_path / "other"
    site.provision(other, ["d"], port=1)
    assert site.explain(good).startswith("accepted")
    cases = {"none": "the client showed no certificate", "stranger": "wrong CA", "expired": "the client's certificate has expired"}
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


def test_the_engine_itself_does_not_let_in_a_client_with_an_expired_certificate(folder, tmp_path, hub):
    kit = tmp_path / "expired"
    shutil.copytree(folder / "kits" / "d", kit)
    site.settle_silo(kit, tmp_path / "gate.sock")
    _expire(kit / "startup" / "client.crt", folder / "authority" / "silodp" / "state" / "cert.json")
    with subprocess.Popen(site.command(kit), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as client:
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


def test_a_modified_server_reads_no_file_by_the_engines_own_network_commands(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("what only this user may read")
    for words in (f"net:echo {secret}", f"net:echo {folder}/kits/a/startup/client.key", "net:process_info", "net:config_vars", "net:stop"):
        heard = _modified(folder).exchange({"a": words.encode()}, 3.0).get("a", b"")
        assert b"only this user" not in heard
        assert b"PRIVATE KEY" not in heard
        assert b"no callback" in heard or b"timeout" in heard, words
    assert (folder / "authority").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("modified_silo", "channel"), [("x0", "aux_communication"), ("x1", "return_only")], indirect=["modified_silo"])
def test_a_silo_that_begins_streams_and_ends_none_keeps_no_other_from_being_heard(hub, modified_silo, channel):
    asked = {"a": b"short", "b": bytes(range(256)) * 2**13}  # one that is sent, and one that is fetched
    assert modified_silo.exchange({"x": f"{channel} fobs 200 100".encode()}, PATIENCE)
    assert hub.exchange(asked, 30.0) == {name: frame[::-1] for name, frame in asked.items()}


def test_one_connection_that_says_nothing_keeps_nobody_out(folder):
    with socket.create_connection(_address(folder)):
        assert site.explain(folder / "kits" / "d").startswith("accepted")


@pytest.mark.parametrize("modified_silo", ["x2"], indirect=True)
def test_no_memory_is_taken_for_what_a_silo_only_announces(folder, hub, modified_silo):
    from nvflare.fuel.f3.sfm.prefix import Prefix

    before = _memory(folder)
    assert modified_silo.exchange({"x": f"aux_communication bytes 8 {2**28}".encode()}, PATIENCE)
    startup = folder / "kits" / "x2" / "startup"
    trust = ssl.create_default_context(cafile=startup / "rootCA.pem")
    trust.check_hostname = False
    trust.load_cert_chain(startup / "client.crt", startup / "client.key")
    announced = bytearray(16)
    Prefix(2**31 - 2**22, 0, 1, 0, 0, 0, 1, 0).to_buffer(announced, 0)
    with socket.create_connection(_address(folder)) as line, trust.wrap_socket(line) as secured:
        secured.sendall(announced)
        secured.settimeout(60.0)
        while secured.recv(2**16):  # greetings, until the server hangs up
            pass
    assert hub.exchange({"a": b"frame"}, PATIENCE) == {"a": b"emarf"}
    assert _memory(folder) - before < 2**28


def test_types_that_do_more_than_hold_values_are_not_read(folder):
    from nvflare.fuel.utils.fobs import fobs

    from silodp.wire.nvflare.app import deafen, listens

    class Engine:
        cell = None

    kept = dict(fobs._decomposers), set(fobs._type_name_whitelist), dict(fobs._dot_handlers)
    try:
        from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer

        fobs.register(NumpyArrayDecomposer)
        assert listens(Engine())
        deafen(Engine())
        assert not listens(Engine())
        with pytest.raises(ValueError, match="not allowed"):
            fobs.Packer(None).unpack({"__fobs_type__": "numpy.ndarray", "__fobs_data__": {}, "__fobs_dc__": None})
        assert fobs.get_dot_handler(NumpyArrayDecomposer().get_download_dot()) is None
    finally:
        for own, old in zip((fobs._decomposers, fobs._type_name_whitelist, fobs._dot_handlers), kept, strict=True):
            own.update(old)


def test_a_call_ends_though_a_byte_comes_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr("silodp.wire.nvflare.app.BEYOND", 0.1)
    hub, courier = ServerHub(str(tmp_path / "hub"), str(tmp_path / "removed")), Courier(str(tmp_path / "gate"))

    class Engine:
        """As NVFlare's, which waits on while there is progress, until it is told to stop."""

        def new_context(self):
            return contextlib.nullcontext(FLContext())

        def send_aux_request(self, *words, **settings):
            (context,) = (word for word in words if isinstance(word, FLContext))
            _until(lambda: context.get_run_abort_signal().triggered)
            return {}

    hub._engine = Engine()
    assert hub._ask("a", Frames.of({"a": b"frame"}), 0.1) is None
    context = FLContext()
    context.get_engine = Engine
    assert courier._carry(TOPIC, Shareable({"ticket": "0" * 32, "timeout": 0.1}), context)["code"] == "malformed"


def _address(folder):
    target = json.loads((folder / "kits" / "d" / "startup" / "fed_client.json").read_text())["servers"][0]["service"]["target"]
    return "127.0.0.1", int(target.rpartition(":")[2])


def _memory(folder) -> int:
    """Bytes that the server's engine has had at most."""
    pid = json.loads((folder / "processes.json").read_text())["server"][0]
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _modified(folder):
    return Hub(folder / "modified.sock")


def _left_out(hub, frames, present):
    """Those who are present reply, and no other delays the exchange beyond its time; on a busy machine they may need more of it."""
    timeout, answered = 1.5, []
    while answered != present:
        began = time.monotonic()
        answered = sorted(hub.exchange(frames, timeout))
        assert time.monotonic() - began < timeout + 60
        assert set(answered) <= set(present)
        timeout *= 2
        assert timeout < PATIENCE


def _until(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _expire(certificate, authority):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    state = json.loads(authority.read_text())
    key = serialization.load_pem_private_key(state["root_pri_key"].encode(), None)
    old, day = x509.load_pem_x509_certificate(certificate.read_bytes()), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    made = made.not_valid_before(datetime.datetime.now(datetime.UTC) - 2 * day).not_valid_after(datetime.datetime.now(datetime.UTC) - day)
    for extension in old.extensions:
        made = made.add_extension(extension.value, extension.critical)
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
