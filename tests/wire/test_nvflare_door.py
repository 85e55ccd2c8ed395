"""What a server or a silo that does not keep to NVFlare's rules can do to the others: nothing, and
take little.
"""

import contextlib
import json
import socket
import ssl
import time
from pathlib import Path
from types import SimpleNamespace

import msgpack
import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.f3.sfm.constants import Types
from nvflare.fuel.f3.sfm.prefix import Prefix
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare_federation import PATIENCE

from silodp.wire.hub import Hub
from silodp.wire.nvflare import believed, door, kits, site

pytestmark = pytest.mark.xdist_group("nvflare")  # one federation for all


@pytest.mark.parametrize(
    "attack",
    [
        "sys.shell cat {secret}",
        "sys.shell ls {place}",
        "train.deploy x",
        "sys.info x",
        "train.start_job x",
    ],
)
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

    config, custom, mark = (
        tmp_path / "job" / "app" / "config",
        tmp_path / "job" / "app" / "custom",
        tmp_path / "ran",
    )
    config.mkdir(parents=True)
    custom.mkdir()
    (custom / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    runs = {
        "format_version": 2,
        "executors": [{"tasks": ["x"], "executor": {"path": "mine.Mine", "args": {}}}],
        "components": [],
    }
    (config / "config_fed_client.json").write_text(json.dumps(runs))
    (config / "config_fed_server.json").write_text(
        json.dumps({"format_version": 2, "workflows": [], "components": []})
    )
    meta = {"name": "job", "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["a"]}}
    (tmp_path / "job" / "meta.json").write_text(json.dumps(meta))
    session = new_secure_session(kits.ADMIN, str(folder / "kits" / kits.ADMIN), timeout=PATIENCE)
    try:
        session.submit_job(str(tmp_path / "job"))
        time.sleep(3.0)
    except (
        Exception
    ) as refused:  # the server may refuse it first, which is no concern of the silo's
        print(refused)
    finally:
        session.close()
    assert not mark.exists()
    assert not [
        entry
        for entry in (folder / "kits" / "a").iterdir()
        if entry.is_dir() and entry.name not in ("startup", "local", "transfer")
    ]


def test_a_modified_server_reads_no_file_by_the_engines_own_network_commands(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("what only this user may read")
    for words in (
        f"net:echo {secret}",
        f"net:echo {folder}/kits/a/startup/client.key",
        "net:process_info",
        "net:config_vars",
        "net:stop",
    ):
        heard = _modified(folder).exchange({"a": words.encode()}, 3.0).get("a", b"")
        assert b"only this user" not in heard
        assert b"PRIVATE KEY" not in heard
        assert b"no callback" in heard or b"timeout" in heard, words
    assert (folder / "authority").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("modified_silo", "channel"),
    [("x0", "aux_communication"), ("x1", "return_only")],
    indirect=["modified_silo"],
)
def test_a_silo_that_begins_streams_and_ends_none_keeps_no_other_from_being_heard(
    hub, modified_silo, channel
):
    asked = {
        "a": b"short",
        "b": bytes(range(256)) * 2**13,
    }  # one that is sent, and one that is fetched
    assert modified_silo.exchange({"x": f"{channel} fobs 200 100".encode()}, PATIENCE)
    assert hub.exchange(asked, 30.0) == {name: frame[::-1] for name, frame in asked.items()}


def test_one_connection_that_says_nothing_keeps_nobody_out(folder):
    with socket.create_connection(_address(folder)):
        assert site.explain(folder / "kits" / "d").startswith("accepted")


@pytest.mark.parametrize("modified_silo", ["x2"], indirect=True)
def test_no_memory_is_taken_for_what_a_silo_only_announces(folder, hub, modified_silo):
    before = _memory(folder)
    assert modified_silo.exchange({"x": f"aux_communication bytes 8 {2**28}".encode()}, PATIENCE)
    trust = _certified(folder / "kits" / "x2" / "startup")
    with socket.create_connection(_address(folder)) as line, trust.wrap_socket(line) as secured:
        secured.sendall(_prefix(2**31 - 2**22, Types.DATA))
        assert _hung_up(secured, 60.0)
    assert hub.exchange({"a": b"frame"}, PATIENCE) == {"a": b"emarf"}
    assert _memory(folder) - before < 2**28


def test_of_too_many_connections_of_one_certificate_the_oldest_is_hung_up_on(folder, hub):
    trust = _certified(folder / "kits" / "x2" / "startup")
    with contextlib.ExitStack() as held:
        lines = []
        for _ in range(door.CONNECTIONS + 1):
            lines.append(
                held.enter_context(
                    trust.wrap_socket(
                        held.enter_context(socket.create_connection(_address(folder)))
                    )
                )
            )
            lines[-1].sendall(_prefix(16, Types.HELLO))
            assert lines[-1].recv(1), (
                "the server answers whoever it has let in: they are counted in this order"
            )
        assert _hung_up(lines[0], 60.0)
        assert not _hung_up(lines[1], 0.5)
        assert hub.exchange({"a": b"frame"}, PATIENCE) == {"a": b"emarf"}


def _says(line, kind, payload=b""):
    """One frame of the engine's, as its own connections send them."""
    line.sendall(_prefix(16 + len(payload), kind) + payload)


@pytest.fixture
def stranger(folder, hub):
    """A connection under x2's certificate that has greeted, and says what it likes."""
    with (
        socket.create_connection(_address(folder)) as line,
        _certified(folder / "kits" / "x2" / "startup").wrap_socket(line) as secured,
    ):
        _says(
            secured, Types.HELLO, msgpack.packb({"endpoint_name": "x2", "timestamp": time.time()})
        )
        assert secured.recv(1)
        yield secured


def test_no_address_that_a_message_names_is_called():
    """The engine would call it in clear, and believe whoever answers there."""
    from nvflare.fuel.f3.cellnet.core_cell import CoreCell

    believed.call_nobody()
    called = []
    cell = SimpleNamespace(
        bb_ext_connector=None,
        connector_manager=SimpleNamespace(get_external_connector=called.append),
        logger=None,
    )
    CoreCell._add_adhoc_connector(cell, "b", "tcp://127.0.0.1:1")
    assert not called


def test_whoever_does_not_read_its_answers_keeps_nobody_else_from_being_heard(hub, stranger):
    stranger.settimeout(5.0)
    with contextlib.suppress(OSError):  # the server stops to read
        for _ in range(300):
            stranger.sendall(1000 * (_prefix(17, Types.PING) + b"\xc0"))
    assert hub.exchange({"a": b"frame", "b": b"frame"}, 20.0) == {"a": b"emarf", "b": b"emarf"}


def test_nobody_hears_of_anothers_stream_from_a_third(monkeypatch):
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.message import Message
    from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer

    believed.believe_certificates()
    heard = []
    monkeypatch.setitem(
        ByteStreamer.tx_task_map, 7, SimpleNamespace(target="a", handle_ack=heard.append)
    )
    for origin in ("x2", "a"):
        ByteStreamer._ack_handler(
            Message({StreamHeaderKey.STREAM_ID: 7, MessageHeaderKey.ORIGIN: origin}, b"")
        )
    assert [message.get_header(MessageHeaderKey.ORIGIN) for message in heard] == ["a"]


@pytest.mark.parametrize(
    "changed", [{"cn__origin": "b"}, {"cn__destination": "a"}, {"client_name": "b"}]
)
def test_a_message_that_says_it_is_anothers_or_for_another_is_refused(changed):
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
    from nvflare.fuel.f3.message import Message

    headers = {
        "cn__origin": "a",
        "cn__destination": "server",
        "client_name": "a",
        "cn__conn_url": "tcp://x:1",
        "cn__secure": True,
    }
    for said, wanted in ((headers, None), (headers | changed, ReturnCode.UNAUTHENTICATED)):
        message = Message(dict(said), b"")
        message.set_prop(MessagePropKey.COMMON_NAME, "a")
        reply = believed._named(message)
        assert (reply and reply.get_header(MessageHeaderKey.RETURN_CODE)) == wanted
        assert not {"cn__conn_url", "cn__secure"} & message.headers.keys()


def test_streams_are_counted_for_whoever_the_certificate_says():
    """The engine compares the origin with the sender's token; of one that is no longer in use it
    knows no owner, and lets any origin pass.
    """
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey
    from nvflare.fuel.f3.cellnet.registry import Registry
    from nvflare.fuel.f3.message import Message

    class Core:
        filters = Registry()

        def add_incoming_filter(self, channel, topic, named):
            self.filters.append(channel, topic, named)

    class Cell:
        core_cell = Core()

    believed.know_by_certificate(Cell())
    (named,) = Core.filters.find("sm", "sm_data")
    for certified, origin, counted in (
        ("a", "a", "a"),
        ("a", "b", "a"),
        ("a", "server.a", "a"),
        (None, "server.x", "server"),
    ):
        message = Message({MessageHeaderKey.ORIGIN: origin, believed.CERTIFIED: "b"}, b"")
        if certified:
            message.set_prop(MessagePropKey.COMMON_NAME, certified)
        named(message)
        assert (
            door._silo(
                SimpleNamespace(headers=message.headers, task=SimpleNamespace(origin=origin))
            )
            == counted
        )


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
            fobs.Packer(None).unpack(
                {"__fobs_type__": "numpy.ndarray", "__fobs_data__": {}, "__fobs_dc__": None}
            )
        assert fobs.get_dot_handler(NumpyArrayDecomposer().get_download_dot()) is None
    finally:
        for own, old in zip(
            (fobs._decomposers, fobs._type_name_whitelist, fobs._dot_handlers), kept, strict=True
        ):
            own.update(old)


def _certified(startup) -> ssl.SSLContext:
    trust = ssl.create_default_context(cafile=startup / "rootCA.pem")
    trust.check_hostname = False
    trust.load_cert_chain(startup / "client.crt", startup / "client.key")
    return trust


def _prefix(length, kind) -> bytes:
    """The first 16 bytes of a frame of the engine's."""
    made = bytearray(16)
    Prefix(length, 0, kind, 0, 0, 1, 1, 0).to_buffer(made, 0)
    return bytes(made)


def _hung_up(line, seconds) -> bool:
    """Whether the server, after its greetings, hangs up within so many seconds."""
    line.settimeout(seconds)
    try:
        while line.recv(2**16):
            pass
    except TimeoutError:
        return False
    return True


def _address(folder):
    target = json.loads((folder / "kits" / "d" / "startup" / "fed_client.json").read_text())[
        "servers"
    ][0]["service"]["target"]
    return "127.0.0.1", int(target.rpartition(":")[2])


def _memory(folder) -> int:
    """Bytes that the server's engine has had at most."""
    pid = json.loads((folder / "processes.json").read_text())["server"][0]
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return 1024 * int(line.split()[1])


def _modified(folder):
    return Hub(folder / "modified.sock")
