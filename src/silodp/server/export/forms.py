"""The forms of `silodp export model`: onnx, torch and sklearn.

onnx and torch contain the whole computation from a row's columns to its risks in one graph. sklearn
is a small .py file with its .npz file. Each form has a .json file with the columns, ranges and
categories, and the meaning of the results.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.problem.models import Shapes
from silodp.core.problem.reading import sheet
from silodp.host import atomic
from silodp.host.model import Stored
from silodp.server.export import standalone


def export(model: Stored, to: str, stem: Path) -> list[Path]:
    """Write stem.json and the form's own files, and return their paths.

    An existing file with other content is not overwritten. Raise BadInput for an unknown form, an
    existing file, a folder that cannot be written, or a model that the form cannot represent.
    """
    if to not in FORMS:
        raise BadInput(f"--to is {to!r}; choose one of {', '.join(FORMS)}")
    about = sheet(model.schema) | {
        "made_by": "silodp",
        "model": model.about.get("model", ""),
        "model_sha256": model.sha256,
    }
    files = {".json": (json.dumps(about, indent=1) + "\n").encode()} | FORMS[to](model, about)
    paths = {stem.with_name(stem.name + suffix): content for suffix, content in files.items()}
    if there := [
        path for path, content in paths.items() if path.exists() and path.read_bytes() != content
    ]:
        raise BadInput(
            f"{there[0]} exists already, and silodp does not overwrite files; choose another "
            "name with --out"
        )
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path, content in paths.items():
            atomic.write(path, content, mode=0o644)
    except OSError as error:
        raise BadInput(
            f"{stem.parent} cannot be written ({error.strerror}); choose another place with --out"
        ) from None
    return list(paths)


def _torch(model: Stored, about: dict[str, Any]) -> dict[str, bytes]:
    """Return the file for `torch.export.load(FILE).module()`, which takes float64 rows (rows,
    columns).
    """
    file = io.BytesIO()
    with _quiet(model, "torch"):
        torch.export.save(_exported(model), file)
    return {".pt2": file.getvalue()}


def _onnx(model: Stored, about: dict[str, Any]) -> dict[str, bytes]:
    """Return the ONNX file. Raise BadInput if a package is missing."""
    try:
        import onnx  # noqa: F401 -- torch's own message about a missing package is several lines long
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise BadInput(f"--to onnx needs the package {error.name}; install silodp[onnx]") from None
    file = io.BytesIO()
    with _quiet(model, "onnx"):
        program = torch.onnx.export(
            _exported(model),
            (),
            input_names=["columns"],
            output_names=["figures"],
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(file)  # type: ignore[arg-type] -- it takes a file, too
    return {".onnx": file.getvalue()}


def _sklearn(model: Stored, about: dict[str, Any]) -> dict[str, bytes]:
    """Return the .npz file with the model's numbers, and the .py file that reads it.

    Raise BadInput if the model has other layers, a feature map, or data that is not a table.
    """
    kinds = {nn.Linear: "linear", nn.ReLU: "relu", Shapes: "shapes"}
    layers = [m for m in model.reading.model.modules() if not isinstance(m, nn.Sequential)]
    if (
        not all(type(m) in kinds for m in layers)
        or not model.schema.columns
        or model.about.get("feature_map")
    ):
        raise BadInput(
            "--to sklearn is for tables and models of linear layers, ReLU and additive "
            "curves; use --to torch or --to onnx"
        )
    numbers: dict[str, Any] = {
        f"scaling.{name}": getattr(model.reading, name).numpy() for name in ("mean", "scale")
    }
    for k, layer in enumerate(m for m in layers if isinstance(m, nn.Linear)):
        numbers[f"weight{k}"] = layer.weight.numpy()
        if layer.bias is None:
            numbers[f"bias{k}"] = np.zeros(layer.out_features, np.float32)
        else:
            numbers[f"bias{k}"] = layer.bias.numpy()
    steps = [kinds[type(m)] for m in layers]
    reach = None
    for shapes in (m for m in layers if isinstance(m, Shapes)):
        numbers |= {"mix": shapes.mix.numpy(), "curved": np.array(shapes.numbers, np.int64)}
        reach = shapes.reach
    file = io.BytesIO()
    text = json.dumps(
        about | {"steps": steps, "reach": reach, "label_range": list(model.schema.label.range)}
    )
    np.savez(file, about=np.array(text), **numbers)
    return {".npz": file.getvalue(), ".py": Path(standalone.__file__).read_bytes()}


FORMS: dict[str, Callable[[Stored, dict[str, Any]], dict[str, bytes]]] = {
    "onnx": _onnx,
    "torch": _torch,
    "sklearn": _sklearn,
}


def _exported(model: Stored) -> torch.export.ExportedProgram:
    """Return the graph of the model for any number of rows."""
    width = len(model.schema.columns) or len(model.schema.features)
    rows = torch.zeros(2, width, dtype=torch.float64)
    return torch.export.export(
        model.reading, (rows,), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )


@contextlib.contextmanager
def _quiet(model: Stored, to: str) -> Iterator[None]:
    """Suppress torch's output and warnings. Turn an error into BadInput with one sentence."""
    logger = logging.getLogger("torch")
    level = logger.level
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logger.setLevel(logging.ERROR)
            yield
    except Exception as error:
        raise BadInput(
            f"the model {model.about.get('model')} cannot be written for {to} "
            f"({type(error).__name__}); use `silodp predict`, or another form"
        ) from None
    finally:
        logger.setLevel(level)
