"""The server's traffic, as whoever listens at its network sees it: couriers without TLS, and the
packets of the loopback device.
"""

import contextlib
import socket
import threading
from pathlib import Path

from gates import LIMIT
from silodp.wire.socket import Socket


class Couriers:
    """A TCP port for each site, whose bytes go to the site's socket and back: the carrier of a
    server elsewhere, without TLS.
    """

    def __init__(self, sockets: dict[str, Path]) -> None:
        self.seen: list[bytes] = []
        self.ports = {}
        self._listeners = []
        for name, path in sockets.items():
            listener = socket.create_server(("127.0.0.1", 0))
            self._listeners.append(listener)
            self.ports[name] = listener.getsockname()[1]
            threading.Thread(target=self._serve, args=(listener, Socket(path)), daemon=True).start()

    def _serve(self, listener: socket.socket, door: Socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                with line, line.makefile("rb") as reader:
                    frame = reader.read(int.from_bytes(reader.read(4), "big"))
                    reply = door.ask(frame, LIMIT)
                    self.seen += [frame, reply]
                    line.sendall(len(reply).to_bytes(4, "big") + reply)

    def exchange(self, frames, timeout):
        replies = {}
        for name, frame in frames.items():
            with (
                socket.create_connection(("127.0.0.1", self.ports[name]), LIMIT) as line,
                line.makefile("rb") as reader,
            ):
                line.sendall(len(frame).to_bytes(4, "big") + frame)
                replies[name] = reader.read(int.from_bytes(reader.read(4), "big"))
        return replies

    def names(self):
        return list(self.ports)

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@contextlib.contextmanager
def captured(ports):
    """A list that has the bytes of every connection to these ports, each way, once the block is
    left; empty without the right to look.
    """
    streams: list[bytes] = []
    try:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    except (AttributeError, PermissionError):
        yield streams
        return
    pieces: dict[tuple[int, int], dict[int, bytes]] = {}
    over = threading.Event()

    def listen() -> None:
        tap.settimeout(0.2)
        while True:
            try:
                packet = tap.recv(2**17)
            except TimeoutError:
                if over.is_set():
                    return
                continue
            if packet[12:14] != b"\x08\x00" or packet[23] != 6:
                continue
            ip = packet[14 : 14 + int.from_bytes(packet[16:18], "big")]
            tcp = ip[4 * (ip[0] & 15) :]
            way, payload = (
                (int.from_bytes(tcp[:2], "big"), int.from_bytes(tcp[2:4], "big")),
                tcp[4 * (tcp[12] >> 4) :],
            )
            if payload and set(way) & set(ports):
                pieces.setdefault(way, {})[int.from_bytes(tcp[4:8], "big")] = payload

    with tap:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
        tap.bind(("lo", 0))
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield streams
        finally:
            over.set()
            thread.join()
    streams += [
        b"".join(payload for _, payload in sorted(found.items())) for found in pieces.values()
    ]
