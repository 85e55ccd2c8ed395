"""What the settings of every daemon have in common: where it listens and keeps its log, and who may
knock.
"""

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
"""What is written into new settings; a daemon itself guesses none of these."""
COMMENTS = {
    "log_bytes": "Size at which a log is put aside; five of them are kept.",
    "socket": "Where the courier knocks. Paths are relative to this file's folder.",
    "socket_mode": "Its mode; others than owner and group are never let in.",
    "socket_group": "Its group, which the courier's user belongs to; \"\" leaves the daemon's own.",
    "couriers": "Users, by name or number, that may ask; with an empty list all whom the mode lets in.",  # noqa: E501
    "connections": "Open connections, at most.",
    "timeout": "Seconds after which a silent or slow courier is hung up on.",
    "maximum_frame": "Bytes of a frame, at most.",
}


def for_unit(daemon: str) -> dict[str, Any]:
    """The settings that the systemd unit silodp-`daemon` and that of its courier expect."""
    return {
        "socket": f"/run/silodp-{daemon}/{daemon}.sock",
        "socket_group": "silodp-socket",
        "couriers": ("silodp-courier",),
    }


@dataclass(frozen=True)
class Site:
    """Where a daemon listens and keeps its log, and who may knock."""

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
        """Raises BadInput, which calls the settings' file `kind`, for a value that no daemon could
        listen by.
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
        wanted = 'octal with read and write for the owner and nothing for others, such as "0660"'
        check_text(kind, "socket_mode", self.socket_mode, r"06[0-7]0", wanted)
        check_texts(kind, "couriers", self.couriers)
        for name, least, most in (
            ("log_bytes", 1000, 2**40),
            ("connections", 1, 1024),
            ("maximum_frame", 1000, 2**32 - 1),
        ):
            check_whole(kind, name, getattr(self, name), least, most)
        check_number(kind, "timeout", self.timeout, above=0, below=3601)
