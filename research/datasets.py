"""The data sets of the studies: the two of the wheel, and MNIST and CIFAR-10, which are read from
their published files in --data-dir.

The preprocessing (standardisation with pooled statistics, PCA) is the paper's: it is computed on
all records in the clear and charged to no ledger, so it is not private.
"""

import gzip
import hashlib
import io
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from silodp.core.errors import BadInput
from silodp.silo.data.datasets import DATASETS as EMBEDDED
from silodp.silo.data.datasets import Dataset, Silo, Split, split_silos

PER_DIGIT = 774  # MNIST images of one digit in one silo: 1/7 of the 5,421 that the rarest digit has
PCA_DIMENSIONS = 50
CIFAR_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
HOW_TO_GET = {
    "mnist": (
        "get train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz "
        "(ossci-datasets.s3.amazonaws.com/mnist), and give --data-dir DIR"
    ),
    "cifar10": (
        "get cifar-10-binary.tar.gz or cifar-10-python.tar.gz "
        "(www.cs.toronto.edu/~kriz/cifar.html), and give --data-dir DIR"
    ),
}


def _mnist(trial: int, data_dir: Path | None, *, pixels: bool = False) -> Split:
    """N = 25: one silo for each pair of an even and an odd digit, label 1 is odd; 50 principal
    components of standardised pixels.

    Of each digit the first 5 * 774 training images are used, and no image is in two silos.
    """
    return split_silos(_mnist_silos(data_dir, pixels), trial, 2, _signed if pixels else np.asarray)


def _signed(pixels: np.ndarray) -> np.ndarray:
    return (pixels / np.float32(127.5) - 1).astype(np.float32)


@lru_cache(maxsize=2)  # the trials of one experiment differ in the split only
def _mnist_silos(data_dir: Path | None, pixels: bool) -> list[Silo]:
    images, digit = _idx_pair(data_dir)
    members = [np.flatnonzero(digit == d)[: 5 * PER_DIGIT] for d in range(10)]
    if min(map(len, members)) < 5 * PER_DIGIT:
        raise BadInput(
            f"the MNIST files in {data_dir} have fewer than {5 * PER_DIGIT} images of some "
            "digit; take the official ones."
        )
    blocks = np.stack(members).reshape(10, 5, PER_DIGIT)
    flat = images[blocks.ravel()].reshape(-1, 28 * 28)
    if pixels:
        x = flat.reshape(*blocks.shape, 1, 28, 28)
    else:
        x = _pca(flat).reshape(*blocks.shape, PCA_DIMENSIONS)
    y = np.repeat([0, 1], PER_DIGIT)
    return [
        (f"{2 * i}/{2 * j + 1}", np.concatenate([x[2 * i, j], x[2 * j + 1, i]]), y)
        for i in range(5)
        for j in range(5)
    ]


def _pca(pixels: np.ndarray) -> np.ndarray:
    """Pixels (mean 0, variance 1 over all of them) on their first principal axes, whose largest
    entry is made positive.
    """
    from scipy.linalg import eigh  # slow to load; before its BLAS is limited

    pixels = pixels.astype(
        np.float64
    )  # sums of products of bytes are exact in float64, in whatever order BLAS takes them
    mean = pixels.mean(0)
    last = pixels.shape[1] - 1
    moments = pixels.T @ pixels / len(pixels)
    with threadpool_limits(
        1
    ):  # 0.2 s; with more threads than idle cores, OpenBLAS spins for up to 10 s here
        axes = eigh(
            moments - np.outer(mean, mean), subset_by_index=[last - PCA_DIMENSIONS + 1, last]
        )[1][:, ::-1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), range(PCA_DIMENSIONS)])
    return (
        (pixels @ axes - mean @ axes) / np.sqrt(moments.trace() / len(mean) - mean.mean() ** 2)
    ).astype(np.float32)


def _cifar10(trial: int, data_dir: Path | None, *, pixels: bool = False) -> Split:
    """N = 10: one silo for each class; all 60,000 images, as the paper splits each silo's data
    itself; channels standardised, unless as pixels.
    """
    labels, images = (np.concatenate(part) for part in zip(*_cifar_batches(data_dir), strict=True))
    silos = [
        (name, images[labels == k], labels[labels == k]) for k, name in enumerate(CIFAR_CLASSES)
    ]
    if pixels:
        return split_silos(silos, trial, 10, _signed)
    mean = images.sum((0, 2, 3), dtype=np.int64) / images[:, 0].size
    square = (
        np.array([np.square(images[:, c], dtype=np.uint16).sum(dtype=np.int64) for c in range(3)])
        / images[:, 0].size
    )
    centre, rate = (
        v.astype(np.float32)[:, None, None] for v in (mean, 1 / np.sqrt(square - mean**2))
    )
    return split_silos(
        silos, trial, 10, lambda x: (x - centre) * rate
    )  # image bytes grow fourfold only here


def _idx_pair(data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    arrays = []
    for name, ndim in (("train-images-idx3-ubyte", 3), ("train-labels-idx1-ubyte", 1)):
        names = [f"{name}.gz", name, name.replace("-idx", ".idx")]
        path = _first(
            "mnist",
            data_dir,
            [f"{folder}{n}" for n in names for folder in ("", "mnist/", "MNIST/raw/")],
        )
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(_checked(data, path))
        shape = tuple(np.frombuffer(data[4 : 4 + 4 * ndim].ljust(4 * ndim, b"\0"), ">u4").tolist())
        if (
            data[:4] != bytes([0, 0, 8, ndim])
            or len(data) != 4 + 4 * ndim + int(np.prod(shape))
            or shape[1:] not in ((), (28, 28))
        ):
            raise BadInput(
                f"{path} is not a whole idx file of MNIST; it may be another file, or have "
                "been cut short."
            )
        arrays.append(np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape))
    images, labels = arrays
    if len(images) != len(labels) or labels.max(initial=0) > 9:
        raise BadInput(
            f"the MNIST files in {data_dir} have {len(images)} images and {len(labels)} "
            "labels; each image needs one digit."
        )
    return images, labels


def _cifar_batches(data_dir: Path | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(labels, images) of the six batches. The binary version is preferred, for it needs no
    unpickling.
    """
    forms = (
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-py",
        "cifar-10-python.tar.gz",
    )
    places = [f"{folder}{form}" for form in forms for folder in ("", "cifar10/")]
    source = _first(
        "cifar10",
        data_dir,
        [*places, "."] if data_dir is not None and data_dir.name in forms else places,
    )
    suffix = ".bin" if "-bin" in source.name else ""
    names = [
        f"{batch}{suffix}"
        for batch in (
            "data_batch_1",
            "data_batch_2",
            "data_batch_3",
            "data_batch_4",
            "data_batch_5",
            "test_batch",
        )
    ]
    members = _members(source, names)
    for name in names:
        data = _checked(members.pop(name), source / name)
        if not suffix:
            labels, pixels = _unpickled(data)
        else:
            labels, pixels = _unpacked(data)
        if (
            pixels.shape != (len(labels), 3072)
            or not 0 <= labels.min(initial=10) <= labels.max(initial=0) <= 9
        ):
            raise BadInput(
                f"{source / name} is not a whole batch of CIFAR-10; it may be another "
                "file, or have been cut short."
            )
        yield labels, pixels.reshape(-1, 3, 32, 32)


def _members(source: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The named files of a folder or of a tar archive, which is never unpacked to disk."""
    found: dict[str, bytes] = {}
    try:
        if source.is_dir():
            return {name: (source / name).read_bytes() for name in names}
        with tarfile.open(source, "r:gz") as archive:
            for member in archive:
                name = Path(member.name).name
                if name in names and member.size < 2**26:
                    file = archive.extractfile(member)
                else:
                    file = None
                if file is not None:
                    found[name] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise BadInput(
            f"{source} does not hold the six whole batches of CIFAR-10 "
            f"({type(error).__name__}); get it again."
        ) from None
    if len(found) < len(names):
        raise BadInput(
            f"{source} lacks {', '.join(name for name in names if name not in found)}; get "
            "it again."
        )
    return found


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds numpy arrays from a Python 2 pickle and nothing else: no other name that the file
    gives is ever looked up.
    """

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct"):
                return lambda *_: np.ndarray((0,), np.uint8)
            case ("numpy", "ndarray"):
                return np.ndarray
            case ("numpy", "dtype"):
                return lambda code, *_: np.dtype(
                    code
                )  # the old pickles' integer flags are deprecated in numpy
        raise pickle.UnpicklingError(f"{module}.{name} is not an array")


def _unpickled(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
        return np.array(batch["labels"], np.int64), np.asarray(batch["data"], np.uint8)
    except Exception:  # a damaged pickle may raise anything
        return np.empty(0, np.int64), np.empty(0, np.uint8)


def _unpacked(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.frombuffer(data if len(data) % 3073 == 0 else b"", np.uint8).reshape(-1, 3073)
    return rows[:, 0].astype(np.int64), rows[:, 1:]


def _checked(data: bytes, path: Path) -> bytes:
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != MD5[path.name]:
        raise BadInput(
            f"{path} differs from the published file (its MD5 is not {MD5[path.name]}); "
            "get it again."
        )
    return data


def _first(name: str, data_dir: Path | None, places: Sequence[str]) -> Path:
    if data_dir is None:
        raise BadInput(f"data set {name!r} is not embedded: {HOW_TO_GET[name]}.")
    for place in places:
        if (data_dir / place).exists():
            return data_dir / place
    raise BadInput(
        f"--data-dir {data_dir} does not hold {name} ({Path(places[0]).name} is not "
        f"there): {HOW_TO_GET[name]}."
    )


DATASETS: dict[str, Dataset] = EMBEDDED | {
    "mnist": Dataset(
        "mnist",
        "MNIST: odd or even, one silo for each odd/even pair",
        38700,
        25,
        False,
        HOW_TO_GET["mnist"],
        _mnist,
        True,
    ),
    "cifar10": Dataset(
        "cifar10",
        "CIFAR-10: ten classes, one silo for each",
        60000,
        10,
        False,
        HOW_TO_GET["cifar10"],
        _cifar10,
        True,
    ),
}
