"""Images of digits, odd or even, a convolutional network, three silos as real processes: gates that
hold the records, couriers, and a server.

Run it: `python examples/images_over_the_network.py`, with `flower` or `direct` behind it for
another engine than NVIDIA FLARE, and then the number of rounds. It starts everything on this
machine over loopback, trains, verifies every ledger, and stops everything: about a minute with
`direct`, a few with an engine. Nothing is downloaded.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from silodp import Problem
from silodp.core.figures import rounded_up
from silodp.core.problem.losses import cross_entropy
from silodp.silo.data.datasets import DATASETS
from silodp.testing.evaluate import error_rate

HERE = Path(__file__).parent
MODEL = f"{HERE / 'digits_cnn.py'}:digits_cnn"


def silodp(*words: object) -> str:
    command = [sys.executable, "-P", "-m", "silodp.cli", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(engine: str = "nvflare", rounds: str = "16") -> tuple[torch.Tensor, torch.Tensor]:
    """Does all of it; (held-out images, what the model says of each class)."""
    with tempfile.TemporaryDirectory(prefix="silodp-") as home:
        folder = Path(home) / "f"
        data = ("--data", "digits", "--silos", 3, "--epsilon", 8)
        silodp("federation", "up", "--folder", folder, "--engine", engine, *data, "--model", MODEL)
        try:
            order = (
                "--algorithm",
                "mb-sgd",
                "--rounds",
                rounds,
                "--step",
                1.5,
                "--clip",
                1,
                "--epsilon",
                8,
            )
            told = json.loads(
                silodp("federation", "run", "--folder", folder, "--model", MODEL, *order, "--json")
            )
            for silo in told["silos"]:
                print(
                    f"{silo['name']} answered {silo['answered']} of {told['questions']}, "
                    "and spent epsilon "
                    f"{rounded_up(silo['spent_epsilon_at_most'], 3, 'f')}."
                )
                print(
                    silodp(
                        "ledger", "verify", folder / "silos" / silo["name"] / "ledger.db"
                    ).strip()
                )
        finally:
            silodp("federation", "down", "--folder", folder)
        parameters = load_file(folder / "runs/1/model.safetensors")

    sys.path.insert(0, str(HERE))
    from digits_cnn import digits_cnn

    split = DATASETS["digits"].load(0, None)
    problem = Problem(digits_cnn(64, split.classes), cross_entropy)
    w = torch.cat([parameters[name].flatten() for name in problem.shapes])[None]
    error = error_rate(problem, w, split.test_x.flatten(1), split.test_y).item()
    print(
        f"Test error {error:.3f} over {len(split.test_y)} held-out images (looked at raw "
        "data: a research figure)."
    )
    return split.test_x, problem.outputs(w, split.test_x.flatten(1))[0].detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
