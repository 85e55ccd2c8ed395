"""Peers of a real NVFlare federation: stand-ins for gates, and a server and silos that do not keep
to NVFlare's rules.
"""

import gc
import threading
import time
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent

from silodp.wire.hub import serve_hub
from silodp.wire.nvflare.app import FETCH

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


class Modified(FLComponent):
    """An engine that does what it is told over a socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def handle_event(self, event_type, fl_ctx):
        if event_type == EventType.SYSTEM_START:
            self.cell = fl_ctx.get_engine().cell
            threading.Thread(
                target=serve_hub,
                args=(self.path, self.attack, list, threading.Event()),
                daemon=True,
            ).start()


class ModifiedServer(Modified):
    """What a server that does not keep to NVFlare's rules can send: an admin command that asks the
    client not to check any right.
    """

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
        """Bytes of sent messages that the engine still holds; from now on Python looks for none of
        them by itself.
        """
        from nvflare.fuel.f3.streaming.byte_streamer import TxTask

        gc.disable()
        return sum(
            task.stream.get_size() + len(task.buffer)
            for task in gc.get_objects()
            if isinstance(task, TxTask)
        )

    def network_command(self, topic, name, path, timeout) -> bytes:
        """A command of the network under the engine; with a path, its content is a Datum, which the
        engine reads when it sends it back.
        """
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


class ModifiedSilo(Modified):
    """What a silo that does not keep to NVFlare's rules can send to the server: beginnings of
    streams, with whatever size they claim.
    """

    def attack(self, frames, timeout):
        from nvflare.fuel.f3.message import Message
        from nvflare.fuel.f3.streaming.stream_const import (
            STREAM_CHANNEL,
            STREAM_DATA_TOPIC,
            StreamDataType,
            StreamHeaderKey,
        )

        channel, encoding, count, size = frames["x"].decode().split()
        for number in range(int(count)):
            headers = {
                StreamHeaderKey.CHANNEL: channel,
                StreamHeaderKey.TOPIC: FETCH,
                StreamHeaderKey.SIZE: int(size),
                StreamHeaderKey.OFFSET: 0,
                StreamHeaderKey.STREAM_ID: time.monotonic_ns(),
                StreamHeaderKey.SEQUENCE: 0,
                StreamHeaderKey.DATA_TYPE: StreamDataType.CHUNK,
                StreamHeaderKey.STREAM_REQ_ID: f"{number}",
                StreamHeaderKey.PAYLOAD_ENCODING: encoding,
            }
            self.cell.core_cell.fire_and_forget(
                STREAM_CHANNEL, STREAM_DATA_TOPIC, "server", Message(headers, b"x")
            )
        return {"x": b"sent"}


def _datum(path: str) -> bytes:
    import msgpack
    from nvflare.fuel.utils.fobs import lobs
    from nvflare.fuel.utils.fobs.decomposer import DATA_CONTENT

    fields = {
        "datum_id": "12345678-1234-1234-1234-123456789abc",
        "datum_type": 9,
        "dot": 0,
        "value": path,
    }
    kind = {
        "__fobs_type__": "nvflare.fuel.utils.fobs.datum.Datum",
        "__fobs_dc__": "nvflare.fuel.utils.fobs.decomposer.DataClassDecomposer",
    }
    body = msgpack.packb({"x": kind | {"__fobs_data__": {DATA_CONTENT: fields}}})
    return lobs._Header(lobs.MARKER_MAIN, 0, len(body)).to_bytes() + body


def until(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
