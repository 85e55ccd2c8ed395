"""`silodp silo personalise`: a personal model of one silo, made inside the silo, at no price.

Nothing of it leaves. The file is marked with the silo's name, and everything that sends or exports
a model refuses a file with such a mark. The model has seen records without noise. It is not
private, and neither is any figure about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task
from silodp.host import atomic
from silodp.host.model import FILE, PERSONAL, contents, refuse_personal
from silodp.silo.data.faults import Faults
from silodp.silo.data.heldout import held_out, held_out_set
from silodp.silo.data.reading import find_schema, read_records
from silodp.silo.data.records import Records
from silodp.silo.fits.compare import Table, compare
from silodp.silo.fits.figures import scale_of
from silodp.silo.fits.rows import Rows
from silodp.silo.ledger.durable import DurableLedger
from silodp.silo.service.daemon import approved_map, approved_problem
from silodp.silo.service.policy import DaemonSettings, Policy

FIGURES = "figures.json"
STAYS = (
    "The personal model is NOT private: it has seen the records without noise, and a reader of it "
    "may learn about single patients. Neither the model nor these figures may leave the silo: "
    "never send them. The shared model may."
)


@dataclass(frozen=True)
class Personalised:
    """The personal model of a silo, and how good it is there."""

    path: Path
    trained: int
    """Records that it was fitted to."""
    scored: int
    """Records that the figures are of."""
    how: str
    table: Table
    shares: dict[str, float]
    """The weight of each family of fits in the model."""


def personalise(policy: Path, trained: Path) -> Personalised:
    """Fit a personal model to the records of a silo, and write it into `personal` beside its
    policy.

    Args:
        policy: the silo's policy.toml.
        trained: the released model: a run's folder, or its file.

    Raises:
        BadInput: the model is another one than the policy approves, or there are too few records.
    """
    place = DaemonSettings.load(policy)
    silo = Policy.load(policy).silo
    schema = find_schema(place)
    faults = Faults()
    data = read_records(place, schema, faults)
    problem = approved_problem(place, data.x.shape[-1], schema)
    records = data.records(approved_map(place, schema))
    about, tensors = contents(trained)
    refuse_personal(trained, about)
    shared = _parameters(trained, place, schema, problem, about, tensors)
    persons = data.known_by[3] if problem.person else None
    held = _held_out(place, data.records(), persons)
    own, test = _rows(problem, records, data.void, held, tensors)
    start = problem.initial([0])[0]
    found = compare(problem, shared, own, test, start)
    task = schema or Task.plain(len(place.classes))
    table = found.table(problem, scale_of(task, own_loss=bool(place.loss)))
    folder = _private_folder(policy.resolve().parent / "personal")
    split = problem.split(found.model.personal).items()
    parameters = {name: value.float().contiguous() for name, value in split}
    path = folder / FILE
    atomic.write(path, save(tensors | parameters, metadata=about | {PERSONAL: silo}), mode=0o600)
    made = Personalised(
        path, found.trained, found.scored.records, found.how, table, found.model.shares
    )
    atomic.write(folder / FIGURES, json.dumps(words(made), indent=1) + "\n", mode=0o600)
    return made


def words(made: Personalised) -> dict[str, object]:
    """Return what --json prints, and what the file beside the model contains."""
    return {
        "model": str(made.path),
        "private": False,
        "stays": STAYS,
        "records": made.trained,
        "scored": made.scored,
        "by": made.how,
        "figures": made.table,
        "shares": made.shares,
    }


def _parameters(
    trained: Path,
    place: DaemonSettings,
    schema: Schema | None,
    problem: Problem,
    about: dict[str, str],
    tensors: dict[str, Tensor],
) -> Tensor:
    """Return the released model as one point (d,)."""
    if schema is not None and about.get("schema", schema.text) != schema.text:
        raise BadInput(
            f"{trained} was trained by another schema than the silo's; personalise a model "
            "of this silo's own study"
        )
    try:
        parts = [tensors[name].reshape(shape).flatten() for name, shape in problem.shapes.items()]
    except (KeyError, RuntimeError):
        raise BadInput(
            f"{trained} is not the model {place.model} that the policy approves; "
            "personalise one that this silo has trained"
        ) from None
    return torch.cat(parts).double()


def _held_out(place: DaemonSettings, records: Records, persons: Sequence[str] | None) -> Tensor:
    """Return which records the gate keeps for testing, (n,) bool: by their positions, and persons
    by the ledger's marks.
    """
    n = records.counts[0]
    mask = held_out(n, place.held_out)
    if persons is not None and mask.any():
        marks = DurableLedger.open(Path(place.ledger)).marks(persons, records.contents)
        mask = held_out_set(marks, int(mask.sum()))
    return torch.from_numpy(mask)


def _rows(
    problem: Problem,
    records: Records,
    void: np.ndarray | None,
    held: Tensor,
    tensors: dict[str, Tensor],
) -> tuple[Rows, Rows | None]:
    """Return the rows to fit to, and those to score on where records are held out.

    A record that the gate counts as zero is in neither.
    """
    x = records.x[0].double()
    if "scaling.mean" in tensors:
        x = (x - tensors["scaling.mean"].double()) / tensors["scaling.scale"].double()
    y = records.y[0]
    usable = torch.ones(len(y), dtype=torch.bool)
    if void is not None:
        usable = ~torch.from_numpy(void)
    own = usable & ~held
    test = usable & held
    fitted = Rows.of(x[own], y[own], problem.person)
    if not bool(held.any()):
        return fitted, None
    return fitted, Rows.of(x[test], y[test], problem.person)


def _private_folder(folder: Path) -> Path:
    """Return the folder, which only its owner can list or read."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise BadInput(
                f"{folder} is a link, or belongs to another user; remove it, so that the "
                "personal model is yours alone"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise BadInput(
            f"{folder} cannot be made ({error.strerror}); the silo's folder must be writable"
        ) from None
    return folder
