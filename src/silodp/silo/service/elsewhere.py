"""Try a user's own feature map in a second process, on invented records.

A map may depend on its process: on a clock, a hash of text, a draw. No record is used here. The
gate compares the digests of both processes before it serves.
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
"""Seconds after which the second process is stopped."""


def refuse_other_elsewhere(mapped: FeatureMap, source: bytes, features: int) -> None:
    """Raise BadInput unless the map of a file gives the same bits in a second process."""
    question = {
        "text": mapped.text,
        "source": base64.b64encode(source).decode(),
        "features": features,
        "threads": torch.get_num_threads(),
    }
    try:
        output = subprocess.run(
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
    if output.split()[-1:] != [_digest(mapped, features)]:
        raise BadInput(
            f"the features {mapped.text} differ in a second process; compute them from the record "
            "alone: from no clock, no draw and no hash of text"
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
