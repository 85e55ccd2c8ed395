"""MNIST and CIFAR-10 have the paper's silos, whatever standard distribution they are read from,
and bad files are refused.
"""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from research import datasets
from research.datasets import DATASETS
from silodp.core.errors import BadInput
from silodp.silo.data.datasets import Split

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
BATCHES = [
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
]


def rows(split: Split) -> torch.Tensor:
    """All records of a split, training and test, one row each, in lexicographic order."""
    x = torch.cat([split.train.x[split.train.mask], split.test_x]).flatten(1).double().numpy()
    return torch.from_numpy(x[np.lexsort(x.T[::-1])])


def refusal(name: str, data_dir: Path | None) -> str:
    with pytest.raises(BadInput) as caught:
        DATASETS[name].load(0, data_dir)
    assert str(caught.value).endswith(".")
    return str(caught.value)


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def mnist(monkeypatch) -> dict[str, bytes]:
    """A small MNIST: 4 images of a digit in each silo, so 20 of each digit are used; digit d has 20
    + d.
    """
    monkeypatch.setattr(datasets, "PER_DIGIT", 4)
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(10), 20 + np.arange(10)))
    files = {IMAGES: idx(rng.integers(0, 256, (len(labels), 28, 28))), LABELS: idx(labels)}
    files |= {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in files.items()}
    monkeypatch.setattr(
        datasets, "MD5", {name: hashlib.md5(data).hexdigest() for name, data in files.items()}
    )
    return files


def put(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist_reads_every_usual_layout(tmp_path, mnist, folder, suffix):
    put(
        tmp_path / folder,
        **{f"{name}{suffix}": mnist[f"{name}{suffix}"] for name in (IMAGES, LABELS)},
    )
    split = DATASETS["mnist"].load(0, tmp_path)
    assert split.train.x.shape == (25, 6, 50)
    assert split.test_x.shape == (50, 50)
    assert split.train.names[:6] == ("0/1", "0/3", "0/5", "0/7", "0/9", "2/1")


def test_mnist_silos_share_no_image_and_hold_their_two_digits(tmp_path, mnist):
    split = DATASETS["mnist"].load(0, put(tmp_path, **mnist))
    everything = rows(split)
    assert len(everything.unique(dim=0)) == len(everything) == 200

    labels = np.frombuffer(mnist[LABELS], np.uint8, offset=8)
    images = np.frombuffer(mnist[IMAGES], np.uint8, offset=16).reshape(-1, 784)
    used = np.concatenate([np.flatnonzero(labels == d)[:20] for d in range(10)])
    pixels = (images[used] - images[used].mean()) / images[used].std()
    with threadpool_limits(1):
        components = PCA(50, svd_solver="full").fit_transform(pixels)
    # The principal components are scikit-learn's up to sign, and each record's is that of an image
    # of one of its silo's digits.
    by_size = {
        tuple(np.round(np.abs(row[:5]), 3)): labels[i]
        for row, i in zip(components, used, strict=True)
    }
    for k, name in enumerate(split.train.names):
        for x, y in zip(split.train.x[k], split.train.y[k], strict=True):
            digit = by_size[tuple(np.round(np.abs(x[:5].double().numpy()), 3))]
            assert str(digit) in name.split("/")
            assert y == digit % 2


def test_bad_mnist_files_are_refused(tmp_path, mnist, monkeypatch):
    assert "--data-dir" in refusal("mnist", None)
    assert "--data-dir" in refusal("mnist", tmp_path)
    changed = put(
        tmp_path / "changed", **{f"{IMAGES}.gz": mnist[f"{IMAGES}.gz"][:-1], LABELS: mnist[LABELS]}
    )
    assert "differs from the published file" in refusal("mnist", changed)
    for number, (images, labels) in enumerate(
        [
            (mnist[IMAGES][:-1], mnist[LABELS]),
            (mnist[LABELS], mnist[LABELS]),
            (b"", mnist[LABELS]),
            (idx(np.zeros((5, 8, 8))), mnist[LABELS]),
        ]
    ):
        assert "not a whole idx file" in refusal(
            "mnist", put(tmp_path / str(number), **{IMAGES: images, LABELS: labels})
        )
    assert "each image needs one digit" in refusal(
        "mnist", put(tmp_path / "short", **{IMAGES: mnist[IMAGES], LABELS: idx(np.zeros(3))})
    )
    monkeypatch.setattr(datasets, "PER_DIGIT", 5)
    assert "fewer than 25 images of some digit" in refusal("mnist", put(tmp_path / "few", **mnist))


def python2_pickle(labels: list[int], pixels: np.ndarray) -> bytes:
    """What Python 2's cPickle wrote for {'labels': [...], 'data': array}: byte strings, old module
    names, integer flags.
    """

    def number(k: int) -> bytes:
        return b"J" + struct.pack("<i", k)

    def string(data: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(data)) + data

    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + number(0) + number(1) + b"tR("
    dtype += number(3) + string(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n("
        + number(0)
        + b"t"
        + string(b"b")
        + b"tR("
    )
    array += (
        number(1)
        + b"("
        + number(pixels.shape[0])
        + number(pixels.shape[1])
        + b"t"
        + dtype
        + b"I00\n"
        + string(pixels.tobytes())
        + b"tb"
    )
    return (
        b"\x80\x02}("
        + string(b"labels")
        + b"]("
        + b"".join(map(number, labels))
        + b"e"
        + string(b"data")
        + array
        + b"u."
    )


@pytest.fixture
def cifar(monkeypatch) -> dict[str, bytes]:
    """Six batches of 10 images, one of each class, in the binary and the Python version."""
    rng, files = np.random.default_rng(0), {}
    for name in BATCHES:
        labels, pixels = (
            rng.permutation(10).astype(np.uint8),
            rng.integers(0, 256, (10, 3072), np.uint8),
        )
        files[f"{name}.bin"] = np.concatenate([labels[:, None], pixels], 1).tobytes()
        files[name] = python2_pickle(labels.tolist(), pixels)
    monkeypatch.setattr(
        datasets, "MD5", {name: hashlib.md5(data).hexdigest() for name, data in files.items()}
    )
    return files


def pack(folder: Path, form: str, files: dict[str, bytes]) -> Path:
    """Write one of the four forms in which CIFAR-10 is distributed."""
    inner = "cifar-10-batches-bin" if "bin" in form else "cifar-10-batches-py"
    members = {
        name: data for name, data in files.items() if name.endswith(".bin") == ("bin" in form)
    } | {"readme.html": b"hello"}
    if not form.endswith(".tar.gz"):
        put(folder / inner, **members)
        return folder
    with tarfile.open(put(folder) / form, "w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(f"{inner}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return folder


FORMS = [
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
]


def test_cifar10_is_the_same_from_every_distribution(tmp_path, cifar):
    first, *others = (
        DATASETS["cifar10"].load(0, pack(tmp_path / form, form, cifar)) for form in FORMS
    )
    assert first.train.x.shape == (10, 4, 3, 32, 32)
    assert first.test_x.shape == (20, 3, 32, 32)
    assert first.train.y.tolist() == [[k] * 4 for k in range(10)]
    assert first.test_y.tolist() == [k for k in range(10) for _ in range(2)]
    assert first.classes == 10
    for split in others:
        assert torch.equal(split.train.x, first.train.x)
        assert torch.equal(split.test_x, first.test_x)


def test_cifar10_channels_are_standardised_and_pixels_keep_their_place(tmp_path, cifar):
    split = DATASETS["cifar10"].load(0, pack(tmp_path, FORMS[0], cifar) / FORMS[0])
    everything = torch.cat([split.train.x.flatten(0, 1), split.test_x]).double()
    torch.testing.assert_close(
        everything.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        everything.std((0, 2, 3), correction=0),
        torch.ones(3, dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )
    raw = np.concatenate(
        [np.frombuffer(cifar[f"{name}.bin"], np.uint8).reshape(-1, 3073)[:, 1:] for name in BATCHES]
    ).reshape(-1, 3, 32, 32)
    expected = (raw - raw.mean((0, 2, 3), keepdims=True)) / raw.std((0, 2, 3), keepdims=True)
    nearest = np.abs(expected - split.test_x[0].numpy()).max((1, 2, 3)).min()
    assert nearest < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_bad_cifar10_files_are_refused(tmp_path, cifar, form, monkeypatch):
    assert "--data-dir" in refusal("cifar10", None)
    assert "--data-dir" in refusal("cifar10", tmp_path)
    name = "data_batch_3.bin" if "bin" in form else "data_batch_3"
    short = cifar | {name: cifar[name][:-1]}
    assert f"{name} differs from the published file" in refusal(
        "cifar10", pack(tmp_path / "changed", form, short)
    )
    assert form in refusal(
        "cifar10", pack(tmp_path / "absent", form, {k: v for k, v in cifar.items() if k != name})
    )
    monkeypatch.setitem(datasets.MD5, name, hashlib.md5(short[name]).hexdigest())
    assert f"{name} is not a whole batch" in refusal(
        "cifar10", pack(tmp_path / "short", form, short)
    )
    if form.endswith(".tar.gz"):
        archive = pack(tmp_path / "cut", form, cifar) / form
        archive.write_bytes(archive.read_bytes()[:-2000])
        assert form in refusal("cifar10", tmp_path / "cut")


class Intruder:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_pickle_cannot_run_code_even_if_its_checksum_is_right(tmp_path, cifar, monkeypatch):
    attack = pickle.dumps({"labels": [0], "data": Intruder(tmp_path / "touched")})
    pickle.loads(attack)
    (tmp_path / "touched").unlink()  # the attack works against a plain unpickler
    monkeypatch.setitem(datasets.MD5, "data_batch_1", hashlib.md5(attack).hexdigest())
    assert "not a whole batch" in refusal(
        "cifar10", pack(tmp_path, "cifar-10-batches-py", cifar | {"data_batch_1": attack})
    )
    assert not (tmp_path / "touched").exists()
