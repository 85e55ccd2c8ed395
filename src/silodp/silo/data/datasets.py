"""Load the two built-in data sets, cut into silos as in the paper's experiments.

The preprocessing (standardisation with pooled statistics, PCA) is the paper's. It is a
deterministic function of all silos' records, computed in the clear and charged to no ledger. It
reproduces experiments on public data, and is not private.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.silo.data.records import Records


@dataclass(frozen=True, eq=False)
class Split:
    """One trial's random assignment of the records.

    80 % of each silo's records are for training. The union of the silos' other 20 % is for testing.
    """

    train: Records
    test_x: Tensor
    test_y: Tensor
    classes: int

    def to(self, device: str) -> "Split":
        """Return the same split on `device`."""
        return Split(
            self.train.to(device), self.test_x.to(device), self.test_y.to(device), self.classes
        )


@dataclass(frozen=True)
class Dataset:
    """A built-in data set.

    `load(trial, data_dir)` returns the split of that trial, the same one each time.
    """

    name: str
    title: str
    records: int
    silos: int
    embedded: bool
    how_to_get: str
    load: Callable[..., Split]
    pixels: bool = False
    """Whether they are images. Of these `load` has the same split as pixels within [-1, 1] too,
    without anything that was learnt from the records.
    """

    def of(self, trial: int, data_dir: Path | None, *, raw: bool = False) -> Split:
        """Return the split as the paper prepares it, or with `raw` as pixels, for a feature map."""
        if raw and self.pixels:
            return self.load(trial, data_dir, pixels=True)
        return self.load(trial, data_dir)


Silo = tuple[str, np.ndarray, np.ndarray]  # name, x, y


def split_silos(
    silos: Sequence[Silo],
    trial: int,
    classes: int,
    scale: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Split:
    """Return a trial's split of these silos. Raise BadInput for a negative trial."""
    if trial < 0:
        raise BadInput(f"the trial is {trial}, but must be 0 or more.")
    train = []
    test = []
    for i, (_, x, y) in enumerate(silos):
        order = np.random.default_rng((trial, i)).permutation(len(y))
        cut = len(y) * 4 // 5
        train.append((scale(x[order[:cut]]), y[order[:cut]]))
        test.append((scale(x[order[cut:]]), y[order[cut:]]))
    test_x, test_y = (torch.from_numpy(np.concatenate(part)) for part in zip(*test, strict=True))
    return Split(
        Records.of(train, [name for name, _, _ in silos]), test_x.float(), test_y.long(), classes
    )


def _of_sklearn(name: str, header: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return features and classes of a table that scikit-learn contains.

    It is read without scikit-learn, whose import would take a second of every command.
    """
    package = find_spec("sklearn")
    assert package
    path = Path(package.origin or "").parent / "datasets" / "data" / name
    table = np.loadtxt(path, delimiter=",", skiprows=header)
    return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(int)


def _wbcd(trial: int, data_dir: Path | None) -> Split:
    """Return the split with N = 2: one silo for each diagnosis. Label 1 is malignant."""
    x, benign = _of_sklearn("breast_cancer.csv", header=1)
    x = (x - x.mean(0)) / x.std(0)
    y = 1 - benign
    return split_silos(
        [(name, x[y == k], y[y == k]) for k, name in enumerate(("benign", "malignant"))], trial, 2
    )


def _digits(trial: int, data_dir: Path | None, *, pixels: bool = False) -> Split:
    """Return the split with N = 5: digits 2i and 2i+1 in silo i. Label 1 is odd.

    Pixels are divided by 16, their public range.
    """
    x, digit = _of_sklearn("digits.csv.gz")
    silos = []
    for d in range(0, 10, 2):
        rows = digit // 2 == d // 2
        silos.append((f"{d}/{d + 1}", x[rows] / 16, digit[rows] % 2))
    if pixels:
        return split_silos(silos, trial, 2, lambda x: 2 * x - 1)
    return split_silos(silos, trial, 2)


_HERE = "it comes with scikit-learn"
_ALL = (
    Dataset(
        "wbcd",
        "Wisconsin breast cancer: malignant or benign, one silo for each",
        569,
        2,
        True,
        _HERE,
        _wbcd,
    ),
    Dataset(
        "digits",
        "8x8 digits: odd or even, one silo for each two digits",
        1797,
        5,
        True,
        _HERE,
        _digits,
        True,
    ),
)
DATASETS = {dataset.name: dataset for dataset in _ALL}
