"""How the constants of the maps that ship were learnt: `python -m research.learn_features
FOLDER`, from public pictures alone.

`photo`: crops at six scales of the three photographs in scikit-learn and matplotlib; filters are a
dictionary of whitened patches (Coates and Ng 2012). `digit`: a small network that tells
scikit-learn's 1,797 digits (UCI, other writers than MNIST's) apart, with their labels, and edges of
the same digits drawn larger. Another machine's arithmetic gives slightly other numbers: the files
in the package are the ones that count.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import matplotlib
import numpy as np
import sklearn.datasets
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save
from sklearn.datasets import load_digits
from torch import Tensor, nn

from silodp.core.features import pictures
from silodp.core.features.maps import MOST

PHOTOGRAPHS = {
    Path(sklearn.datasets.__file__).parent
    / "images"
    / "china.jpg": "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
    Path(sklearn.datasets.__file__).parent
    / "images"
    / "flower.jpg": "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
    Path(matplotlib.get_data_path())
    / "sample_data"
    / "grace_hopper.jpg": "a8ca6d734765703b09728ab47fe59f473d93ae3967fc24c7c0288c3c7adb7130",
}
SCALES = (1, 0.5, 0.33, 0.25, 0.18, 0.12)


def crops(count: int, coins: torch.Generator) -> Tensor:
    """(count, 3, 32, 32) within [0, 1], as many from each photograph and scale; half of them
    mirrored.
    """
    found = []
    each = count // (len(PHOTOGRAPHS) * len(SCALES))
    for path, known in PHOTOGRAPHS.items():
        if hashlib.sha256(path.read_bytes()).hexdigest() != known:
            raise SystemExit(
                f"{path} is another picture than the one that the constants were learnt from"
            )
        whole = (
            torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)[
                None
            ]
            / 255
        )
        for scale in SCALES:
            size = [max(32, int(side * scale)) for side in whole.shape[2:]]
            small = F.interpolate(
                whole, size=size, mode="bilinear", antialias=True, align_corners=False
            )[0]
            for _ in range(each):
                i, j = (int(torch.randint(0, side - 31, (), generator=coins)) for side in size)
                crop = small[:, i : i + 32, j : j + 32]
                found.append(crop.flip(2) if torch.rand((), generator=coins) < 0.5 else crop)
    return torch.stack(found)


def dictionary(
    x: Tensor, filters: int, coins: torch.Generator, patches: int = 100_000
) -> tuple[Tensor, Tensor]:
    """Filters and offsets for `pictures.responses`: the second half mirrors the first."""
    side = pictures.PATCH
    half = filters // 2
    a, i, j = (
        torch.randint(0, high, (patches,), generator=coins)
        for high in (len(x), 33 - side, 33 - side)
    )
    found = x.unfold(2, side, 1).unfold(3, side, 1)[a, :, i, j].flatten(1)
    found = found - found.mean(1, keepdim=True)
    found = found / (found.square().mean(1, keepdim=True) + pictures.CONTRAST).sqrt()
    mirror = torch.arange(found.shape[1]).reshape(3, side, side).flip(2).flatten()
    centre = (found.mean(0) + found.mean(0)[mirror]) / 2
    spread = torch.cov((found - centre).double().T)
    values, axes = torch.linalg.eigh((spread + spread[mirror][:, mirror]) / 2)
    whiten = ((axes * (values + 0.1).rsqrt()) @ axes.T).float()
    white = (found - centre) @ whiten
    words = F.normalize(white[torch.randperm(patches, generator=coins)[:half]])
    for _ in range(10):  # each patch moves the one filter, or mirrored filter, that answers it most
        answers = white @ torch.cat([words, words[:, mirror]]).T
        best = answers.abs().argmax(1)
        turned = torch.where((best >= half)[:, None], white[:, mirror], white)
        words = F.normalize(
            torch.zeros_like(words).index_add_(
                0, best % half, turned * answers.gather(1, best[:, None])
            )
        )
    words = torch.cat([words, words[:, mirror]]) @ whiten
    return (words - words.mean(1, keepdim=True)).reshape(filters, 3, side, side), words @ centre


def axes_of(seen: Tensor, weight: Tensor, count: int) -> dict[str, Tensor]:
    """Centre and first principal axes of weighted rows, the axes in 8 bits, and a scale that
    half-whitens.
    """
    seen = seen * weight
    values, axes = torch.linalg.eigh(torch.cov(seen.double().T))
    values = values.flip(0)[:count].float()
    axes = axes.flip(1)[:, :count].float()
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    largest = axes.abs().amax(0)
    scale = largest / 127 * (values / values[0]) ** -0.25
    return {
        "weight": weight,
        "centre": seen.mean(0),
        "axes": (axes / largest * 127).round().to(torch.int8),
        "scale": scale,
    }


def learn_photo() -> dict[str, Tensor]:
    coins = torch.Generator().manual_seed(0)
    x = crops(9000, coins)
    filters, offset = (part.half().float() for part in dictionary(x, 128, coins))
    seen = torch.cat([pictures.photo(part, filters, offset) for part in x.split(500)])
    edges = 36 * 7 * 4 + 24
    weight = torch.cat(
        [
            (part.var(0).sum().rsqrt()).expand(part.shape[1])
            for part in (seen[:, :edges], seen[:, edges:])
        ]
    )
    return {"filters": filters.half(), "offset": offset.half()} | axes_of(seen, weight, MOST)


# --- digits --------------------------------------------------------------------------------------


def moved(
    x: Tensor,
    coins: torch.Generator,
    *,
    turn: float,
    shear: float,
    zoom: float,
    shift: float,
    about: float = 1.0,
) -> Tensor:
    """Each picture by an affine map of its own."""
    r, sh = (by * torch.randn(len(x), generator=coins) for by in (turn, shear))
    s, t = (by * torch.randn(len(x), 2, generator=coins) for by in (zoom, shift))
    window = torch.stack(
        [(1 + s[:, 0]) * r.cos(), sh - r.sin(), t[:, 0], r.sin(), (1 + s[:, 1]) * r.cos(), t[:, 1]],
        1,
    ).reshape(-1, 2, 3)
    window[:, :, :2] *= about
    return F.grid_sample(
        x, F.affine_grid(window, list(x.shape), align_corners=False), align_corners=False
    )


def drawn(x: Tensor, coins: torch.Generator) -> Tensor:
    """8 x 8 digits as 28 x 28 ones, four times each, moved a little, sharper, their weight in the
    middle.
    """
    large = (
        F.interpolate(x, size=(28, 28), mode="bicubic", align_corners=False)
        .clamp(0, 1)
        .repeat(4, 1, 1, 1)
    )
    large = (
        (moved(large, coins, turn=0.1, shear=0.15, zoom=0.1, shift=0, about=28 / 18) - 0.25) * 2
    ).clamp(0, 1)
    at = torch.arange(28.0)
    ink = large.sum((1, 2, 3)).clamp_min(1e-6)
    y = (large.sum((1, 3)) @ at / ink - 13.5) / 14
    x0 = (large.sum((1, 2)) @ at / ink - 13.5) / 14
    one = torch.ones_like(y)
    zero = torch.zeros_like(y)
    window = torch.stack([one, zero, x0, zero, one, y], 1).reshape(-1, 2, 3)
    return F.grid_sample(
        large, F.affine_grid(window, list(large.shape), align_corners=False), align_corners=False
    )


def learn_digit(epochs: int = 60) -> dict[str, Tensor]:
    x, y = (torch.from_numpy(np.asarray(part)) for part in load_digits(return_X_y=True))
    x = x.reshape(-1, 1, 8, 8).float() / 16
    coins = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 32, 3, padding=1),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Linear(256, 64),
    ]
    head = nn.Linear(64, 10)
    parameters = [p for layer in (*layers, head) for p in layer.parameters()]
    adam = torch.optim.Adam(parameters, weight_decay=1e-4)
    rates = torch.optim.lr_scheduler.OneCycleLR(adam, 4e-3, epochs * -(-len(x) // 128))
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=coins).split(128):
            seen = moved(x[batch], coins, turn=0.12, shear=0.2, zoom=0.12, shift=0.1).clamp(0, 1)
            seen = seen ** torch.exp(
                0.5 * torch.randn(len(batch), 1, 1, 1, generator=coins)
            ) + 0.05 * torch.randn(seen.shape, generator=coins)
            adam.zero_grad()
            known = head(
                pictures.strokes(seen.clamp(0, 1), [(layer.weight, layer.bias) for layer in layers])
            )
            F.cross_entropy(known, y[batch], label_smoothing=0.1).backward()
            adam.step()
            rates.step()
    found = {
        f"{kind}{k}": getattr(layer, kind).detach().half()
        for k, layer in enumerate(layers)
        for kind in ("weight", "bias")
    }
    seen = pictures.strokes(
        x, [(found[f"weight{k}"].float(), found[f"bias{k}"].float()) for k in range(4)]
    )
    values, axes = torch.linalg.eigh(torch.cov(seen.double().T))
    values = values.flip(0)[:40]
    axes = axes.flip(1)[:, :40]
    found |= {
        "strokes.centre": seen.mean(0),
        "strokes.axes": (axes * (values / values[0]) ** -0.25).float(),
    }
    edges = pictures.edges(drawn(x, coins)).flatten(1)
    return found | axes_of(edges, torch.ones(edges.shape[1]), 150)


if __name__ == "__main__":
    for name, learn in (("photo", learn_photo), ("digit", learn_digit)):
        data = save({key: value.contiguous() for key, value in learn().items()})
        (Path(sys.argv[1]) / f"{name}.safetensors").write_bytes(data)
        print(name, len(data), hashlib.sha256(data).hexdigest())
