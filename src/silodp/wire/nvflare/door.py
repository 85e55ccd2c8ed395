"""What one peer can take of an engine: no memory for bytes that have not come, no turn at the door before it has shown who it is, and few streams at once.

NVFlare 2.9.0 sets aside, and fills with zeros, as much memory as a header announces; it shakes hands in the one thread that lets everybody in; and it waits for
the rest of a stream in threads that all peers share. So 16 bytes took 2 GiB, one connection that said nothing kept everybody out, and the beginnings of 64 streams
of one silo made the server deaf to all others.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections import Counter
from functools import cache
from typing import Any

from nvflare.fuel.f3.cellnet.defs import Encoding
from nvflare.fuel.f3.drivers import socket_conn
from nvflare.fuel.f3.drivers.tcp_driver import TcpStreamServer
from nvflare.fuel.f3.streaming.blob_streamer import BlobHandler
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError

FRAME = 2**23
"""Bytes of one frame of the engine's, which cuts what it carries into pieces of 1 MiB."""
STREAMS = 8
"""Streams of one silo that the server reads, or works on, at once; it has threads for 64. A silo that does what it should has one or two."""
HANDSHAKE = 10.0
"""Seconds in which whoever connects must have shown its certificate."""


@cache
def believe_no_sizes() -> None:
    """From now on memory is taken for what has come, whatever a header announces; a frame that would be longer than any here is not read."""
    socket_conn.MAX_FRAME_SIZE = FRAME
    begin = BlobHandler.handle_blob_cb

    def handle_blob_cb(self: BlobHandler, future: Any, stream: Any, *args: Any, **kwargs: Any) -> int:
        if (stream.headers or {}).get(StreamHeaderKey.PAYLOAD_ENCODING) != Encoding.FOBS:  # what is, is kept in the pieces that came
            stream.size = 0
        return begin(self, future, stream, *args, **kwargs)

    BlobHandler.handle_blob_cb = handle_blob_cb


@cache
def share_fairly() -> None:
    """From now on each connection shakes hands in its own thread, and no silo has more than so many streams: one too many is refused."""
    TcpStreamServer.get_request, TcpStreamServer.finish_request = _accept, _greet
    begin, run, guard, streams = BlobHandler.handle_blob_cb, BlobHandler._run_blob_cb, threading.Lock(), Counter[str]()

    def end(silo: str) -> None:
        with guard:
            streams[silo] -= 1

    def handle_blob_cb(self: BlobHandler, future: Any, stream: Any, *args: Any, **kwargs: Any) -> int:
        silo = _silo(stream)
        with guard:
            if free := streams[silo] < STREAMS:
                streams[silo] += 1
        if not free:
            self._fail(stream, future, StreamError("too many streams at once"))
            return 0
        try:
            return begin(self, future, stream, *args, **kwargs)
        except BaseException:
            end(silo)
            raise

    def run_blob_cb(self: BlobHandler, future: Any, stream: Any, args: tuple, kwargs: dict) -> None:
        try:
            run(self, future, stream, args, kwargs)
        finally:  # what was to be done with it is done; when the last byte has come, too, or none will, it is over
            future.add_done_callback(end, _silo(stream))

    BlobHandler.handle_blob_cb, BlobHandler._run_blob_cb = handle_blob_cb, run_blob_cb


def _silo(stream: Any) -> str:
    """Whose certificate the stream came under; the engine has checked that, and lets a silo call itself silo.ANYTHING too."""
    return stream.task.origin.partition(".")[0]


def _accept(self: TcpStreamServer) -> tuple[Any, Any]:
    if isinstance(self.socket, ssl.SSLSocket):
        vars(self.socket)["do_handshake_on_connect"] = False
    return self.socket.accept()


def _greet(self: TcpStreamServer, request: Any, client_address: Any) -> None:
    """In the connection's own thread."""
    with contextlib.suppress(OSError):  # no certificate, a bad one, or none in time: it is hung up on
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(HANDSHAKE)
            request.do_handshake()
            request.settimeout(None)
        self.RequestHandlerClass(request, client_address, self)
