"""A personal model: the released one, fitted further to one silo's own records, inside the silo and
at no price, since nothing of it leaves.

Minimised is the mean loss of the silo's records plus `pull` / 2 times the squared distance from the
shared model (mean-regularised multi-task learning, MR-MTL): with a strong pull it is the shared
model, with none a model of this silo alone. The strength is chosen by cross-validation in here.
What comes out has seen records without any noise. It is not private, and neither is any figure
about it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.host import atomic
from silodp.host.model import FILE, PERSONAL, contents
from silodp.silo.data.reading import find_schema, read_records
from silodp.silo.service.daemon import approved_map, approved_problem
from silodp.silo.service.policy import DaemonSettings, Policy

PULLS = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
FOLDS = 5
FEWEST = 20
STEPS = 60
STAYS = (
    "The personal model is NOT private: it has seen the records without noise, and whoever "
    "has it may learn about single patients. "
    "Neither it, nor what it is like, nor these figures may leave the silo; never send "
    "them. The shared model may."
)


@dataclass(frozen=True)
class Personal:
    """What cross-validation found: losses of records that the model had not been fitted to, of the
    shared and of the personal model.
    """

    records: int
    pull: float | None
    """None where the shared model is as good: then none was made."""
    shared: float
    personal: float
    path: Path | None


def personalise(policy: Path, trained: Path) -> Personal:
    """Fits the model in a run's folder, or its file, to the records of the silo whose policy this
    is, and writes it into `personal` beside it.
    """
    place = DaemonSettings.load(policy)
    silo = Policy.load(policy).silo
    schema = find_schema(place)
    data = read_records(place, schema)
    problem = approved_problem(place, data.x.shape[-1], schema)
    records = data.records(approved_map(place, schema))
    about, tensors = _opened(trained)
    if schema is not None and about.get("schema", schema.text) != schema.text:
        raise BadInput(
            f"{trained} was trained by another schema than the silo's; personalise a model "
            "of this silo's own study"
        )
    try:
        start = torch.cat(
            [tensors[name].reshape(shape).flatten() for name, shape in problem.shapes.items()]
        ).double()
    except (KeyError, RuntimeError):
        raise BadInput(
            f"{trained} is not the model {place.model} that the policy approves; "
            "personalise one that this silo has trained"
        ) from None
    x = records.x[0].double()
    y = records.y[0]
    if len(y) < FEWEST:
        raise BadInput(
            f"the silo has {len(y)} records; a personal model needs {FEWEST} or more to be tried on"
        )
    if "scaling.mean" in tensors:
        x = (x - tensors["scaling.mean"].double()) / tensors["scaling.scale"].double()
    found = _chosen(problem, start, x, y)
    if found.pull is None:
        return found
    w = fitted(problem, start, x, y, found.pull)
    own = {name: value.float().contiguous() for name, value in problem.split(w).items()}
    path = _private_folder(policy.resolve().parent / "personal") / FILE
    atomic.write(path, save(tensors | own, metadata=about | {PERSONAL: silo}), mode=0o600)
    return Personal(found.records, found.pull, found.shared, found.personal, path)


def fitted(problem: Problem, start: Tensor, x: Tensor, y: Tensor, pull: float) -> Tensor:
    """(d,): the least of mean loss + pull / 2 ||w - start||^2, by L-BFGS from the shared model
    on.
    """
    w = start.clone().requires_grad_(True)
    steps = torch.optim.LBFGS(
        [w],
        max_iter=STEPS,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-9,
        tolerance_change=1e-12,
    )

    def closure() -> Tensor:
        steps.zero_grad()
        value = problem.losses(w[None], x, y)[0].mean() + pull / 2 * (w - start).square().sum()
        value.backward()
        return value

    steps.step(closure)
    found = w.detach()
    if bool(torch.isfinite(found).all()):
        return found
    return start


def _chosen(problem: Problem, start: Tensor, x: Tensor, y: Tensor) -> Personal:
    """The pull whose models do best on records that they were not fitted to; none unless that is
    clear of the shared model by a standard error.
    """
    fold = np.random.default_rng(0).permutation(len(y)) % FOLDS
    shared = _losses(problem, start, x, y)
    tried = {pull: torch.empty_like(shared) for pull in PULLS}
    for k in range(FOLDS):
        kept = torch.from_numpy(fold != k)
        out = torch.from_numpy(fold == k)
        for pull in PULLS:
            tried[pull][out] = _losses(
                problem, fitted(problem, start, x[kept], y[kept], pull), x[out], y[out]
            )
    best = min(PULLS, key=lambda pull: float(tried[pull].mean()))
    gain = shared - tried[best]
    clear = float(gain.mean()) > float(gain.std()) / math.sqrt(len(gain))
    return Personal(
        len(y), best if clear else None, float(shared.mean()), float(tried[best].mean()), None
    )


@torch.no_grad()
def _losses(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return problem.losses(w[None], x, y)[0]


def _opened(trained: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    about, tensors = contents(trained)
    if PERSONAL in about:
        raise BadInput(
            f"{trained} is a personal model already; start from the shared one, or the "
            "pull would be towards it"
        )
    return about, tensors


def _private_folder(folder: Path) -> Path:
    """The folder, in which nobody but its owner can look or list."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise BadInput(
                f"{folder} is a link, or belongs to somebody else; remove it, so that the "
                "personal model is yours alone"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be made ({error.strerror}); the silo's folder must be writable"
        ) from None
    return folder
