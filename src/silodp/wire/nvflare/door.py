"""What one peer can take of an engine: little memory for bytes that have not come, no turn at the
door before it has shown who it is, and few connections and streams at once.

NVFlare 2.9.0 sets aside, and fills with zeros, as much memory as a header announces; it shakes
hands in the one thread that lets everybody in; and it waits for the rest of a stream in threads
that all peers share. So 16 bytes took 2 GiB, one connection that said nothing kept everybody out,
and the beginnings of 64 streams of one silo made the server deaf to all others.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from nvflare.fuel.f3.cellnet.defs import Encoding
from nvflare.fuel.f3.drivers import socket_conn
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError

from silodp.wire.nvflare.believed import CERTIFIED

FRAME = 2**21
"""Bytes of one frame of the engine's, which cuts what it carries into pieces of 1 MiB."""
STREAMS = 8
"""Streams of one silo that the server reads, or works on, at once; it has threads for 64. A silo
that does what it should has one or two.
"""
CONNECTIONS = 8
"""Of one certificate at once: with one more the oldest is hung up on, which may be one whose other
end is long gone.
"""
HANDSHAKE = 10.0
"""Seconds in which whoever connects must have shown its certificate."""
STRANGERS = 256
"""Connections that have not shown one yet: with one more the oldest of these is hung up on."""


@cache
def believe_no_sizes() -> None:
    """From now on memory is taken for what has come, whatever a header announces; a frame that
    would be longer than any here is not read.
    """
    socket_conn.MAX_FRAME_SIZE = FRAME
    begin = BlobHandler.handle_blob_cb

    def handle_blob_cb(
        self: BlobHandler, future: Any, stream: Any, *args: Any, **kwargs: Any
    ) -> int:
        if (stream.headers or {}).get(
            StreamHeaderKey.PAYLOAD_ENCODING
        ) != Encoding.FOBS:  # what is, is kept in the pieces that came
            stream.size = 0
        return begin(self, future, stream, *args, **kwargs)

    BlobHandler.handle_blob_cb = handle_blob_cb


@cache
def share_fairly() -> None:
    """From now on each connection shakes hands in its own thread, and no silo has more than so many
    streams: one too many is refused.
    """
    TcpStreamServer.get_request, TcpStreamServer.finish_request = _accept, _greet
    begin, run, guard, streams = (
        BlobHandler.handle_blob_cb,
        BlobHandler._run_blob_cb,
        threading.Lock(),
        Counter[str](),
    )

    def end(counted: list[str]) -> None:
        """Once for each stream, whoever finds first that it is over."""
        with guard:
            if counted:
                silo = counted.pop()
                streams[silo] -= 1
                if not streams[silo]:
                    del streams[silo]

    def handle_blob_cb(
        self: BlobHandler, future: Any, stream: Any, *args: Any, **kwargs: Any
    ) -> int:
        silo = _silo(stream)
        with guard:
            if free := streams[silo] < STREAMS:
                streams[silo] += 1
                future.counted = [silo]
        if not free:
            self._fail(stream, future, StreamError("too many streams at once"))
            # the engine would keep its beginning for as long as the sender has said
            stream.task.chunks.clear()
            stream.task.out_seq_chunks.clear()
            return 0
        try:
            return begin(self, future, stream, *args, **kwargs)
        except BaseException:
            end(future.counted)
            raise

    def run_blob_cb(self: BlobHandler, future: Any, stream: Any, args: tuple, kwargs: dict) -> None:
        try:
            run(self, future, stream, args, kwargs)
        finally:
            # what was to be done with it is done; when the last byte has come, too, or none will,
            # it is over
            future.add_done_callback(end, future.counted)

    BlobHandler.handle_blob_cb, BlobHandler._run_blob_cb = handle_blob_cb, run_blob_cb


def _silo(stream: Any) -> str:
    return (stream.headers or {}).get(CERTIFIED) or stream.task.origin.partition(".")[0]


def _accept(self: TcpStreamServer) -> tuple[Any, Any]:
    if isinstance(self.socket, ssl.SSLSocket):
        vars(self.socket)["do_handshake_on_connect"] = False
    return self.socket.accept()


def _greet(self: TcpStreamServer, request: Any, client_address: Any) -> None:
    """In the connection's own thread."""
    with contextlib.suppress(
        OSError
    ):  # no certificate, a bad one, or none in time: it is hung up on
        if isinstance(request, ssl.SSLSocket):
            with _counted(request, "", STRANGERS):
                request.settimeout(HANDSHAKE)
                request.do_handshake()
                request.settimeout(None)
        with (
            _among_its_own(request)
            if isinstance(request, ssl.SSLSocket)
            else contextlib.nullcontext()
        ):
            self.RequestHandlerClass(request, client_address, self)


_GUARD, _CONNECTED = threading.Lock(), dict[str, list[ssl.SSLSocket]]()


def _among_its_own(request: ssl.SSLSocket) -> contextlib.AbstractContextManager[None]:
    """Counts a connection among those of its certificate while it lasts; one whose certificate has
    no name is hung up on.
    """
    certificate: Any = request.getpeercert() or {}
    name = next(
        (
            value
            for part in certificate.get("subject", ())
            for key, value in part
            if key == "commonName"
        ),
        "",
    )
    if not name:
        raise OSError("the certificate has no name")
    return _counted(request, name, CONNECTIONS)


@contextlib.contextmanager
def _counted(request: ssl.SSLSocket, name: str, most: int) -> Iterator[None]:
    """Counts a connection under this name; with one too many the oldest is hung up on."""
    oldest = None
    with _GUARD:
        mine = _CONNECTED.setdefault(name, [])
        mine.append(request)
        if len(mine) > most:
            oldest = mine.pop(0)
    if oldest:
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
    try:
        yield
    finally:
        with _GUARD:
            if request in mine:
                mine.remove(request)
            if not mine and _CONNECTED.get(name) is mine:
                del _CONNECTED[name]
