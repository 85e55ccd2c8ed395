"""A run's curves for TensorBoard or MLflow: the lines of progress.jsonl, under the names that those
tools use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from silodp.core.errors import BadInput
from silodp.pages.runs import Run, noise_share


def scalars(run: Run) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, {name: value}): the questions of a training run, or the points of a comparison
    at 1000 x epsilon.
    """
    for r in run.rounds:
        found = {f"budget/{name}": float(share) for name, share in r["used"].items()}
        if r.get("norm"):
            found |= {
                "release/norm": r["norm"],
                "release/noise": r["noise"],
                "release/noise_share": noise_share(r),
            }
        yield r["question"], found
    for r in run.rows:
        if r["epsilon"]:
            yield (
                round(1000 * r["epsilon"]),
                {
                    f"test_error/{r['curve']}": r["test_error"],
                    f"spent_epsilon/{r['curve']}": r["spent_epsilon"],
                },
            )


def parameters(run: Run) -> dict[str, str]:
    """Return the settings as text."""
    return {
        k: str(v)
        for k, v in run.about.items()
        if isinstance(v, str | int | float) and k != "schema_text"
    } | {"kind": run.kind}


def to_tensorboard(run: Run, folder: Path) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise BadInput(
            "--tensorboard needs the package tensorboard; install silodp[tensorboard]"
        ) from None
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in parameters(run).items()))
        for step, found in scalars(run):
            for name, value in found.items():
                writer.add_scalar(name, value, step)


def to_mlflow(run: Run, folder: Path) -> None:
    os.environ.setdefault(
        "MLFLOW_ALLOW_FILE_STORE", "true"
    )  # newer versions ask, before they write to a folder
    try:
        import mlflow  # type: ignore[import-not-found]
    except ImportError:
        raise BadInput(
            "--mlflow needs the package mlflow (or mlflow-skinny); install silodp[mlflow]"
        ) from None
    client = mlflow.MlflowClient(tracking_uri=folder.resolve().as_uri())
    known = client.get_experiment_by_name("silodp")
    if known:
        experiment = known.experiment_id
    else:
        experiment = client.create_experiment("silodp")
    made = client.create_run(experiment, run_name=str(run.folder.name)).info.run_id
    for name, value in parameters(run).items():
        client.log_param(made, name, value[:500])
    for step, found in scalars(run):
        for name, value in found.items():
            client.log_metric(made, name, value, step=step)
    client.set_terminated(made)
