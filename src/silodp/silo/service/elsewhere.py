"""Try a user's own map of features in a second process, on made-up records.

A map may follow from what its process did before: a clock, a hash of text, a draw. No record is
seen here. The gate compares the digests of both processes before it serves.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import torch

from silodp.core.errors import BadInput
from silodp.core.extension import parse
from silodp.core.features.feature_map import FeatureMap, feature_map
from silodp.host.extension import named, run, run_again
from silodp.host.python_path import child_environment

PATIENCE = 600.0
"""Seconds that the second process is given."""


def refuse_other_elsewhere(mapped: FeatureMap, source: bytes, features: int) -> None:
    """Raise BadInput unless the map of a file gives the same bits in a process of its own."""
    question = {
        "text": mapped.text,
        "source": base64.b64encode(source).decode(),
        "features": features,
        "threads": torch.get_num_threads(),
    }
    try:
        found = subprocess.run(
            [sys.executable, "-P", "-m", "silodp.silo.service.elsewhere"],
            input=json.dumps(question).encode(),
            env=child_environment(),
            cwd=Path(sys.prefix),
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(
            f"the features {mapped.text} cannot be tried in a second process "
            f"({type(error).__name__}); let the gate's user start one"
        ) from None
    if found.split()[-1:] != [_digest(mapped, features)]:
        raise BadInput(
            f"the features {mapped.text} are other ones in a second process; let them follow from "
            "the record alone: from no clock, no draw and no hash of text"
        )


def _digest(mapped: FeatureMap, features: int) -> bytes:
    return mapped.refuse_memory(features).numpy().tobytes().hex().encode()


def main() -> None:
    """Print the bits that a map gives here. The question is on standard input."""
    question = json.load(sys.stdin)
    torch.set_num_threads(question["threads"])
    text = question["text"]
    source = base64.b64decode(question["source"])
    path = parse(text)[0]
    mapped = feature_map(
        text,
        lambda text: named(run(source, path), text),
        fresh=lambda text: named(run_again(source, path), text),
    )
    print(_digest(mapped, question["features"]).decode())


if __name__ == "__main__":
    main()
