"""The gate's pause: a file beside the policy. While it is there the daemon refuses every frame, also after a restart."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from silodp.core.errors import BadInput


def pause_file(policy: str | Path) -> Path:
    return Path(policy).resolve().parent / "paused"


def paused(policy: str | Path) -> bool:
    """Whatever lies there pauses the gate."""
    return os.path.lexists(pause_file(policy))


def set_paused(policy: str | Path, wanted: bool) -> None:
    """Afterwards the gate is paused, or not; an answer that is being computed is finished."""
    path = pause_file(policy)
    try:
        if wanted:
            path.write_text(f"paused {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be {'written' if wanted else 'removed'}: {error.strerror}; run this as the gate's own user"
        ) from None
