"""Check the settings that every daemon has: its socket, its log, and who may connect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from silodp.host.tables import check_number, check_text, check_texts, check_whole

DEFAULTS: dict[str, Any] = {
    "log_bytes": 1_000_000,
    "socket_mode": "0660",
    "socket_group": "",
    "couriers": (),
    "connections": 32,
    "timeout": 30.0,
    "maximum_frame": 2**28,
}
"""Values for new settings. A daemon itself has no defaults for these."""
COMMENTS = {
    "log_bytes": "Size at which a new log is begun; five older ones are kept.",
    "socket": "The socket to which the courier connects. Paths are relative to this file's folder.",
    "socket_mode": "Its mode. Only owner and group can ever connect.",
    "socket_group": "Its group, which the courier's user belongs to; \"\" leaves the daemon's own.",
    "couriers": (
        "Users, by name or number, that may ask. An empty list means all that the mode allows."
    ),
    "connections": "Open connections, at most.",
    "timeout": "Seconds after which a silent or slow courier is disconnected.",
    "maximum_frame": "Bytes of a frame, at most.",
}


def for_unit(daemon: str) -> dict[str, Any]:
    """Return the settings that the systemd units of silodp-`daemon` and its courier expect."""
    return {
        "socket": f"/run/silodp-{daemon}/{daemon}.sock",
        "socket_group": "silodp-socket",
        "couriers": ("silodp-courier",),
    }


@dataclass(frozen=True)
class Site:
    """The socket and the log of a daemon, and the users that may connect."""

    log: str
    log_bytes: int
    socket: str
    socket_mode: str
    socket_group: str
    couriers: tuple[str, ...]
    connections: int
    timeout: float
    maximum_frame: int

    def check(self, kind: str) -> None:
        """Raise BadInput for a value that no daemon could use. `kind` names the settings' file in
        it.
        """
        for name in ("log", "socket"):
            check_text(kind, name, getattr(self, name), r"[^\0\n]{1,4096}", "a path")
        check_text(
            kind,
            "socket_group",
            self.socket_group,
            r"[^\0\n]{0,64}",
            'the name or number of a group, or ""',
        )
        wanted = 'octal with read and write for the owner and no rights for others, such as "0660"'
        check_text(kind, "socket_mode", self.socket_mode, r"06[0-7]0", wanted)
        check_texts(kind, "couriers", self.couriers)
        for name, least, most in (
            ("log_bytes", 1000, 2**40),
            ("connections", 1, 1024),
            ("maximum_frame", 1000, 2**32 - 1),
        ):
            check_whole(kind, name, getattr(self, name), least, most)
        check_number(kind, "timeout", self.timeout, above=0, below=3601)
