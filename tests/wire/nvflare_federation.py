"""Parts of a real NVFlare federation: stand-ins for gates, and a component that watches memory."""

import gc
import threading
import time

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent

from silodp.wire.hub import serve_hub

SILOS = ["a", "b", "c"]
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


class Watcher(FLComponent):
    """Part of the server's engine: counts over a socket what the engine still holds."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def handle_event(self, event_type, fl_ctx):
        if event_type == EventType.SYSTEM_START:
            serving = (self.path, self.left, list, threading.Event())
            threading.Thread(target=serve_hub, args=serving, daemon=True).start()

    def left(self, frames, timeout):
        """Return the bytes of sent messages in memory, from now on without Python's own sweeps."""
        gc.disable()
        tasks = [thing for thing in gc.get_objects() if type(thing).__name__ == "TxTask"]
        left = sum(task.stream.get_size() + len(task.buffer) for task in tasks)
        return dict.fromkeys(frames, str(left).encode())


def until(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)
