"""The two built-in data sets, for a first try, cut into silos as in the paper's experiments.

The preprocessing (standardisation with pooled statistics, PCA) is the paper's: a deterministic
function of all silos' records, computed in the clear and charged to no ledger. It is fit for
reproducing experiments on public data, and not private.
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
    """One trial's random assignment: 80 % of each silo's records to train on, the union of the
    silos' other 20 % to test on.
    """

    train: Records
    test_x: Tensor
    test_y: Tensor
    classes: int

    def to(self, device: str) -> "Split":
        """The same split on `device`."""
        return Split(
            self.train.to(device), self.test_x.to(device), self.test_y.to(device), self.classes
        )


@dataclass(frozen=True)
class Dataset:
    """A built-in data set; `load(trial, data_dir)` gives the split of that trial, the same one each
    time.
    """

    name: str
    title: str
    records: int
    silos: int
    embedded: bool
    how_to_get: str
    load: Callable[..., Split]
    pixels: bool = False
    """Whether they are images, of which `load` has the same split as pixels within [-1, 1] too:
    nothing of it has been learnt from the records.
    """

    def of(self, trial: int, data_dir: Path | None, *, raw: bool = False) -> Split:
        """The split as the paper prepares it; `raw` is for a map of features, which has images as
        pixels.
        """
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
    """Features and classes of a table that scikit-learn has, read without scikit-learn: to load it
    takes a second of every command.
    """
    found = find_spec("sklearn")
    assert found
    table = np.loadtxt(
        Path(found.origin or "").parent / "datasets" / "data" / name, delimiter=",", skiprows=header
    )
    return np.ascontiguousarray(table[:, :-1]), table[:, -1].astype(int)


def _wbcd(trial: int, data_dir: Path | None) -> Split:
    """N = 2: one silo for each diagnosis; label 0 is benign, 1 is malignant."""
    x, benign = _of_sklearn("breast_cancer.csv", header=1)
    x = (x - x.mean(0)) / x.std(0)
    y = 1 - benign
    return split_silos(
        [(name, x[y == k], y[y == k]) for k, name in enumerate(("benign", "malignant"))], trial, 2
    )


def _digits(trial: int, data_dir: Path | None, *, pixels: bool = False) -> Split:
    """N = 5: digits 2i and 2i+1 in silo i; label 1 is odd. Pixels are divided by 16, their public
    range.
    """
    x, digit = _of_sklearn("digits.csv.gz")
    silos = [
        (f"{d}/{d + 1}", x[digit // 2 == d // 2] / 16, digit[digit // 2 == d // 2] % 2)
        for d in range(0, 10, 2)
    ]
    return split_silos(silos, trial, 2, (lambda x: 2 * x - 1) if pixels else np.asarray)


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
