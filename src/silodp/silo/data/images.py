"""Read a silo's folder of images, with one sub-folder for each public class.

Every image becomes a record of one public size. As in `tables`, a sentence names a file and never
its content. A file's name is its record's number, and must not describe the person.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from silodp.core.errors import BadInput
from silodp.core.problem.schema import Images
from silodp.silo.data.faults import Faults
from silodp.silo.data.files import listed

SUFFIXES = (".png", ".jpg", ".jpeg")


def read_images(
    folder: Path, wanted: Images, classes: Sequence[str], faults: Faults | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return x (n, channels x height x width) float32 within [-1, 1], the class of each image,
    (n, 5) prints of the images, of 24 bits each, and which of them are void.

    With `faults` no file is refused: one that is no image of one of the classes is a void record.
    """
    if not folder.is_dir():
        raise BadInput(
            f"{folder} is not a folder; a silo's images are in a folder with a sub-folder "
            f"for each of {listed(classes)}."
        )
    if faults is None:
        files = _files(folder, classes)
    else:
        files = _all_files(folder, classes)
    if not files:
        raise BadInput(
            f"{folder} has no images; a silo needs at least one PNG or JPEG file in a "
            "sub-folder named by its class."
        )
    images = [_image(path, wanted, faults) for path, _ in files]
    x = np.stack([pixels for pixels, _ in images])
    y = np.array([k for _, k in files], np.int64)
    void = None
    if faults is not None:
        void = (y < 0) | np.isnan(x).any((1, 2, 3))
        faults.records = int(void.sum())
    prints = np.array([print_of for _, print_of in images], np.float32)
    return np.nan_to_num(x).reshape(len(x), -1), y.clip(0), prints, void


def _all_files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return every file in the folder and its sub-folders with its class, -1 where it has none."""
    files = []
    for place in sorted(folder.iterdir()):
        if place.name.startswith("."):
            continue
        k = -1
        inside = [place]
        if place.is_dir():
            inside = sorted(place.iterdir())
            if place.name in classes:
                k = list(classes).index(place.name)
        files += [(path, k) for path in inside if not path.name.startswith(".")]
    return sorted(files, key=lambda file: (file[0].name, file[1]))


def _image(path: Path, wanted: Images, faults: Faults | None) -> tuple[np.ndarray, list[float]]:
    """Return an image as `_pixels_and_print` does, or NaN where no image can be read."""
    try:
        return _pixels_and_print(path, wanted)
    except BadInput:
        if faults is None:
            raise
    content = b""
    if path.is_file():
        content = path.read_bytes()
    digest = hashlib.sha256(content).digest()
    return np.full(wanted.shape, np.nan, np.float32), _print_of(digest)


def read_unsorted(folder: Path, wanted: Images) -> tuple[list[str], np.ndarray]:
    """Return the names and pixels of the images in a folder itself, in the order of their names.

    Their classes are unknown. Raise BadInput if there is no image.
    """
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    else:
        files = []
    if not files:
        raise BadInput(
            f"{folder} is no folder with PNG or JPEG files in it; give one that has the "
            "images themselves, without sub-folders."
        )
    return [path.name for path in files], np.stack(
        [_pixels_and_print(path, wanted)[0].reshape(-1) for path in files]
    )


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return every image of the folder with its class, in the order of the files' names.

    If the order were that of the classes, one record's class would move others between batches and
    parts. Raise BadInput for any other file.
    """
    by_name: dict[str, Path] = {}
    for place in sorted(folder.iterdir()):
        if place.name.startswith("."):
            continue
        if not place.is_dir() or place.name not in classes:
            raise BadInput(
                f"{place} is not a sub-folder for one of the schema's classes "
                f"{listed(classes)}; move it away."
            )
        for path in sorted(place.iterdir()):
            if path.name.startswith("."):
                continue
            if path.suffix.lower() not in SUFFIXES:
                raise BadInput(
                    f"{path} has the suffix {path.suffix!r}; an image must be .png, .jpg or .jpeg."
                )
            first = by_name.setdefault(path.name, path)
            if first != path:
                raise BadInput(
                    f"{first} and {path} have one name; give each image of a silo its own, "
                    "since its name alone decides its place."
                )
    return [(path, list(classes).index(path.parent.name)) for _, path in sorted(by_name.items())]


def _pixels_and_print(path: Path, wanted: Images) -> tuple[np.ndarray, list[float]]:
    """Return the pixels (channels, height, width), and the print by which a ledger recognises the
    image.

    The print is of the colours before resizing, however the file compresses them. Raise BadInput if
    the file is no image, or has another size.
    """
    mode = "L" if wanted.channels == 1 else "RGB"
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as file:
            original = _eight_bits(ImageOps.exif_transpose(file))
            image = original.convert(mode)
            colours = original.convert("RGB")
    except Exception:
        # A damaged file can make the decoder raise anything.
        raise BadInput(
            f"{path} is not a complete PNG or JPEG image; it may be damaged or cut short."
        ) from None
    if image.size != (wanted.width, wanted.height):
        if not wanted.resize:
            raise BadInput(
                f"{path} does not have the schema's size of {wanted.width} x {wanted.height} "
                "pixels; resize it, or set resize = true in [images]."
            )
        image = image.resize((wanted.width, wanted.height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, np.float32).reshape(wanted.height, wanted.width, wanted.channels)
    digest = hashlib.sha256(repr(colours.size).encode() + colours.tobytes()).digest()
    return np.moveaxis(pixels / 127.5 - 1, 2, 0), _print_of(digest)


def _print_of(digest: bytes) -> list[float]:
    """Return five numbers of 24 bits each from a digest."""
    return [float(int.from_bytes(digest[i : i + 3], "big")) for i in range(0, 15, 3)]


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the image in a mode that Pillow converts correctly.

    Pillow truncates 16 bits at 255 rather than scaling them, and needs a palette's transparency
    resolved first.
    """
    if image.mode.startswith("I"):
        return Image.fromarray(np.asarray(image, np.float32) / 257).convert("L")
    if image.mode == "P":
        return image.convert("RGBA")
    return image
