"""Report a daemon's counts and states to a monitoring system, in Prometheus' text form.

A gate has no network, so no daemon opens a port for it. Each daemon writes the file that
$SILODP_METRICS names. `silodp ledger metrics` serves these files as one page on loopback.

Formal guarantees: only the names of METRICS are reported. Each is a function of frames, policy,
ledger, clock and dates of files, and never of a record. Counts change when a reply is sent and not
when it is ready. The file is written at times that no answer decides.
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
"""Seconds without a writing after which the daemon counts as gone."""
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
"""Every number that may be reported, with its kind and its help. None depends on a record."""

Labels = tuple[tuple[str, str], ...]
_guard = threading.Lock()
_values: dict[tuple[str, Labels], float] = {}
_forever = contextlib.ExitStack()


def count(name: str, by: float = 1.0, **labels: str) -> None:
    """Add to a counter of METRICS."""
    key = _key(name, "counter", labels)
    with _guard:
        _values[key] = _values.get(key, 0.0) + by


def gauge(name: str, value: float, **labels: str) -> None:
    """Set a state of METRICS."""
    key = _key(name, "gauge", labels)
    with _guard:
        _values[key] = float(value)


def _key(name: str, kind: str, labels: Mapping[str, str]) -> tuple[str, Labels]:
    if METRICS[name][0] != kind:
        raise ValueError(f"{name} is a {METRICS[name][0]}")
    return name, tuple(sorted(labels.items()))


def text(role: str) -> str:
    """Return all counts and states in Prometheus' text form."""
    with _guard:
        values = sorted(_values.items())
    return _written(
        (name, _line(name, (("role", role), *labels), value)) for (name, labels), value in values
    )


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_quoted(word)}"' for key, word in labels)
    return f"{name}{{{inside}}} {value:g}"


def _written(samples: Iterable[tuple[str, str]]) -> str:
    """Return the lines of these (name, line) samples, with each metric's help before its first
    line.
    """
    lines = []
    last = ""
    for name, line in samples:
        if name != last:
            kind, help_text = METRICS[name]
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            last = name
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _quoted(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@contextlib.contextmanager
def reporting(role: str, look: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Write the file that $SILODP_METRICS names every EVERY seconds, while the body runs.

    Before each writing `look` sets its states. Without the variable, no file is written.
    """
    place = os.environ.get("SILODP_METRICS")
    if not place:
        yield
        return
    over = threading.Event()

    def report() -> None:
        while not over.is_set():
            # A state that cannot be read now is read the next time. No daemon ends for it.
            with contextlib.suppress(Exception):
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
    """Report as `reporting` does until the process ends, from within another program's process."""
    _forever.enter_context(reporting(role, look))


def _keep(place: Path, role: str) -> None:
    with contextlib.suppress(OSError):
        atomic.write(place, text(role))
        place.chmod(0o644)  # the monitoring system has a user of its own


# --- the page ------------------------------------------------------------------------------------

_LINE = re.compile(r"(?P<name>[a-z_]+)\{(?P<labels>[^}]*)\} (?P<value>[-+.0-9a-z]+)")


def page(files: Sequence[Path]) -> str:
    """Return the content of all files as one page, without lines that are not of METRICS."""
    samples = []
    for file in files:
        with contextlib.suppress(OSError):
            for line in map(_LINE.fullmatch, file.read_text().splitlines()):
                if line and line["name"] in METRICS:
                    samples.append((list(METRICS).index(line["name"]), line["name"], line[0]))
    return _written((name, line) for _, name, line in sorted(samples))


def ill(files: Sequence[Path], now: float) -> list[str]:
    """Return a sentence for each file whose daemon is down or has stopped writing."""
    sentences = []
    for file in files:
        try:
            if now - file.stat().st_mtime > STALE:
                sentences.append(f"{file} was not written for {STALE:g} seconds")
            elif not re.search(r"^silodp_up\{[^}]*\} 1$", file.read_text(), re.MULTILINE):
                sentences.append(f"{file} shows that its daemon is down")
        except OSError:
            sentences.append(f"{file} is missing")
    return sentences


def serve(
    files: Sequence[Path], address: str, ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve /metrics and /health of these files at HOST:PORT until the process ends.

    Raise BadInput unless HOST is this machine's loopback address and the port is free.
    """
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "::1") or not port.isdecimal():
        raise BadInput(
            f"--listen is {address!r}; it must be 127.0.0.1:PORT: for requests from elsewhere "
            "use a proxy of your own"
        )

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/metrics":
                    code = 200
                    body = page(files)
                case "/health":
                    sentences = ill(files, time.time())
                    code = 503 if sentences else 200
                    body = "".join(f"{sentence}\n" for sentence in sentences) or "ok\n"
                case _:
                    code = 404
                    body = "there are /metrics and /health\n"
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    class PageServer(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if host == "::1" else socket.AF_INET

    try:
        server = PageServer((host, int(port)), Page)
    except OSError as error:
        raise BadInput(
            f"the port at {address} cannot be opened ({error.strerror}); choose another --listen"
        ) from None
    with server:
        ready(server.server_address[1])
        server.serve_forever()
