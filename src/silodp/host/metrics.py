"""What a daemon tells a monitoring system: counts and states in Prometheus' text form, in a file,
and a page of such files on loopback.

A gate has no network, so nothing here opens a port in a daemon: each writes the file that
$SILODP_METRICS names, and `silodp ledger metrics` serves the files. Formal guarantees: only the
names of METRICS can be told, each of them a function of frames, policy, ledger, clock and files'
dates, and never of a record; counts move when a reply is sent and not when it is ready, and the
file is written at times that no answer decides.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.host import atomic

EVERY = 15.0
"""Seconds between two writings of the file."""
STALE = 4 * EVERY
"""Seconds after which a file that was not written again is taken for that of a daemon that is gone.
"""
METRICS: dict[str, tuple[str, str]] = {
    "silodp_up": ("gauge", "1 while the process serves."),
    "silodp_frames_total": (
        "counter",
        (
            "Frames that gate or shuffler replied to, by what became of them: answered, "
            "repeated, or a refusal's code."
        ),
    ),
    "silodp_queue": ("gauge", "Frames that wait for gate or shuffler."),
    "silodp_budget_used_ratio": ("gauge", "Share of the privacy budget that is spent, 0 to 1."),
    "silodp_budget_held_ratio": ("gauge", "Share of the privacy budget that open runs hold."),
    "silodp_paused": ("gauge", "1 while the officer has paused the gate."),
    "silodp_policy_days": ("gauge", "Days until the policy's last."),
    "silodp_certificate_days": (
        "gauge",
        "Days until the first certificate of server or courier expires.",
    ),
    "silodp_carried_total": (
        "counter",
        "Frames that a courier brought to its gate, by what came of it: replied, or why not.",
    ),
    "silodp_connected": ("gauge", "Silos that were connected when the server was last asked."),
    "silodp_exchanges_total": ("counter", "Rounds of questions that the server's hub carried."),
    "silodp_replies_total": ("counter", "Replies of silos in these."),
    "silodp_silent_total": ("counter", "Silos that were asked in these and did not reply."),
    "silodp_exchange_seconds_total": (
        "counter",
        "Seconds that these took, each rounded up to a whole one.",
    ),
}
"""Every number that may be told, with its kind and what it says. None depends on a record."""

Labels = tuple[tuple[str, str], ...]
_guard = threading.Lock()
_values: dict[tuple[str, Labels], float] = {}
_forever = contextlib.ExitStack()


def count(name: str, by: float = 1.0, **labels: str) -> None:
    """Adds to a counter of METRICS."""
    key = _key(name, "counter", labels)
    with _guard:
        _values[key] = _values.get(key, 0.0) + by


def gauge(name: str, value: float, **labels: str) -> None:
    """Sets a state of METRICS."""
    key = _key(name, "gauge", labels)
    with _guard:
        _values[key] = float(value)


def _key(name: str, kind: str, labels: Mapping[str, str]) -> tuple[str, Labels]:
    if METRICS[name][0] != kind:
        raise ValueError(f"{name} is a {METRICS[name][0]}")
    return name, tuple(sorted(labels.items()))


def text(role: str) -> str:
    """Everything told so far, in Prometheus' text form."""
    with _guard:
        found = sorted(_values.items())
    return _written(
        (name, _line(name, (("role", role), *labels), value)) for (name, labels), value in found
    )


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_quoted(word)}"' for key, word in labels)
    return f"{name}{{{inside}}} {value:g}"


def _written(samples: Iterable[tuple[str, str]]) -> str:
    """Lines of samples, each with its metric's name, in whose order they come: what a metric says
    stands before its first.
    """
    lines = []
    last = ""
    for name, line in samples:
        if name != last:
            kind, says = METRICS[name]
            lines += [f"# HELP {name} {says}", f"# TYPE {name} {kind}"]
            last = name
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _quoted(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@contextlib.contextmanager
def reporting(role: str, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While it lasts, the file that $SILODP_METRICS names is written every EVERY seconds, after
    `look` has set its states. None is no file.
    """
    place = os.environ.get("SILODP_METRICS")
    if not place:
        yield
        return
    over = threading.Event()

    def report() -> None:
        while not over.is_set():
            with contextlib.suppress(
                Exception
            ):  # what cannot be told now is told next time; no daemon ends for it
                look()
            _keep(Path(place), role)
            over.wait(EVERY)

    gauge("silodp_up", 1)
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(EVERY)
        gauge("silodp_up", 0)
        _keep(Path(place), role)


def report_forever(role: str, look: Callable[[], None] = lambda: None) -> None:
    """As `reporting`, until the process ends: for a part of somebody else's process."""
    _forever.enter_context(reporting(role, look))


def _keep(place: Path, role: str) -> None:
    with contextlib.suppress(OSError):
        atomic.write(place, text(role))
        place.chmod(0o644)  # the monitoring's user reads it


# --- the page ------------------------------------------------------------------------------------

_LINE = re.compile(r"(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\} (?P<value>[-+.0-9a-z]+)")


def page(files: Sequence[Path]) -> str:
    """All files as one page; a line that is not of METRICS is left out."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            for line in map(_LINE.fullmatch, file.read_text().splitlines()):
                if line and line["name"] in METRICS:
                    found.append((list(METRICS).index(line["name"]), line["name"], line[0]))
    return _written((name, line) for _, name, line in sorted(found))


def ill(files: Sequence[Path], now: float) -> list[str]:
    """A sentence for each file whose daemon is down or silent."""
    said = []
    for file in files:
        try:
            if now - file.stat().st_mtime > STALE:
                said.append(f"{file} was not written for {STALE:g} seconds")
            elif not re.search(r"^silodp_up\{[^}]*\} 1$", file.read_text(), re.MULTILINE):
                said.append(f"{file} says that its daemon is down")
        except OSError:
            said.append(f"{file} is not there")
    return said


def serve(
    files: Sequence[Path], address: str, ready: Callable[[int], None] = lambda port: None
) -> None:
    """/metrics and /health of these files at HOST:PORT, which must be this machine's own; until the
    process ends.
    """
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "::1") or not port.isdecimal():
        raise BadInput(
            f"--listen is {address!r}; it must be 127.0.0.1:PORT: what asks from elsewhere "
            "comes through a proxy of your own"
        )

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wrong = ill(files, time.time())
            code, said = {
                "/metrics": (200, page(files)),
                "/health": (503 if wrong else 200, "".join(f"{one}\n" for one in wrong) or "ok\n"),
            }.get(self.path, (404, "there are /metrics and /health\n"))
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    class Own(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if host == "::1" else socket.AF_INET

    try:
        server = Own((host, int(port)), Page)
    except OSError as error:
        raise BadInput(f"{address} cannot be listened at: {error.strerror}") from None
    with server:
        ready(server.server_address[1])
        server.serve_forever()
