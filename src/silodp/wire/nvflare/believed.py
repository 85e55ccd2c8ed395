"""What an engine believes of what it is sent: what the connection's certificate bears out, and no
word of the message's own about itself.

NVFlare 2.9.0 calls any address that a message names, in clear, and believes whoever answers there;
takes a message's word for whose it is, for where it goes, for a stream's acknowledgement; asks the
sender of what is said to be encrypted for a certificate, and waits an hour in a thread that all
share.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from functools import cache
from typing import Any

from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.cellnet.identity import is_mtls_connection
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.sfm.conn_manager import ConnManager, SfmFrameReceiver
from nvflare.fuel.f3.streaming.byte_streamer import ByteStreamer
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey

from silodp.wire.nvflare.kits import ADMIN, SERVER

CERTIFIED = "silodp_certified"
FRAMES = 8
"""Frames of one certificate that the server works on at once, of 100 threads; the next is not read
before one of them is done.
"""
CLIENT = "client_name"
IGNORED = (MessageHeaderKey.SECURE, MessageHeaderKey.ENCRYPTED, MessageHeaderKey.CONN_URL)


@cache
def call_nobody() -> None:
    """From now on no address that a message names is called."""
    CoreCell._add_adhoc_connector = lambda self, to_cell, url: None


@cache
def believe_certificates() -> None:
    """From now on the server lets nobody in without a certificate, works on few frames of each at
    once, and hears of a stream from its receiver alone.
    """
    call_nobody()
    let_in, heard = ConnManager.update_endpoint, ByteStreamer._ack_handler
    guard, turns = (
        threading.Lock(),
        defaultdict[str, threading.BoundedSemaphore](lambda: threading.BoundedSemaphore(FRAMES)),
    )

    def update_endpoint(self: ConnManager, sfm_conn: Any, data: Any) -> None:
        if not is_mtls_connection(sfm_conn.conn.connector.params):
            sfm_conn.conn.close()
            raise CommError(CommError.BAD_DATA, "no certificate")
        let_in(self, sfm_conn, data)

    def process_frame(self: SfmFrameReceiver, frame: Any) -> None:
        with guard:
            turn = turns[self.conn.conn.get_conn_properties().get(DriverParams.PEER_CN.value) or ""]
        turn.acquire()  # in the thread that reads this connection
        try:
            done = self.conn_manager.frame_mgr_executor.submit(work, self, frame)
        except BaseException:
            turn.release()
            raise
        done.add_done_callback(lambda _: turn.release())

    def work(receiver: SfmFrameReceiver, frame: Any) -> None:
        vars(receiver.conn)["last_activity"] = time.time()
        receiver.conn_manager.process_frame_task(receiver.conn, frame)

    def ack_handler(message: Any) -> None:
        task = ByteStreamer.tx_task_map.get(message.get_header(StreamHeaderKey.STREAM_ID))
        if task and task.target == message.get_header(MessageHeaderKey.ORIGIN):
            heard(message)

    ConnManager.update_endpoint, SfmFrameReceiver.process_frame = update_endpoint, process_frame
    ByteStreamer._ack_handler = staticmethod(ack_handler)


def know_by_certificate(cell: Any) -> None:
    """From now on every message has the name of its connection's certificate, and one that says it
    is another's, or for another, is refused.
    """
    cell.core_cell.add_incoming_filter("*", "*", _named)


def _named(message: Any) -> Any:
    """Within the server's own machine there are no certificates, and its operator speaks for
    many.
    """
    name = message.get_prop(MessagePropKey.COMMON_NAME) or ""
    message.set_header(CERTIFIED, name)
    for header in IGNORED:
        message.remove_header(header)
    said = (
        message.get_header(MessageHeaderKey.ORIGIN),
        message.get_header(MessageHeaderKey.DESTINATION),
    )
    if name not in ("", ADMIN) and (
        said != (name, SERVER) or message.get_header(CLIENT) not in (None, name)
    ):
        return make_reply(ReturnCode.UNAUTHENTICATED)
    return None
