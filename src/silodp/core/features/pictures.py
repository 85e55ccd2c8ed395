"""What shipped maps see in a picture: directions of edges (HOG), soft-thresholded patches, and what
a small network of digits sees.

All of it is arithmetic on one picture; a batch is only for speed. Nothing here is learnt: the
constants come from `constants/`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 9
CELL = 4
PATCH = 6
GRID = 3
THRESHOLD = 0.25
CONTRAST = 10 / 255**2
LIMIT = 0.4
"""The most that one direction may weigh in a block of cells, whose norm is 1."""


def sized(x: Tensor, channels: int, side: int) -> Tensor:
    """Pictures (n, c, h, w) within [-1, 1] as (n, channels, side, side) within [0, 1]."""
    x = ((x + 1) / 2).clamp(0, 1)
    if channels == 1:
        x = x.mean(1, keepdim=True)
    else:
        x = x.expand(-1, 3, -1, -1)
    if x.shape[2:] == (side, side):
        return x
    return F.interpolate(x, size=(side, side), mode="bilinear", antialias=True, align_corners=False)


def edges(x: Tensor) -> Tensor:
    """HOG: (n, c, s, s) to blocks of 2 x 2 cells, (n, 4 BINS, s/CELL - 1, s/CELL - 1); of several
    channels the steepest counts.
    """
    gx = F.pad(x, (1, 1, 0, 0), mode="replicate")
    gy = F.pad(x, (0, 0, 1, 1), mode="replicate")
    gx = gx[..., 2:] - gx[..., :-2]
    gy = gy[:, :, 2:] - gy[:, :, :-2]
    steepest = (gx.square() + gy.square()).argmax(1, keepdim=True)
    gx = gx.gather(1, steepest)
    gy = gy.gather(1, steepest)
    length = (gx.square() + gy.square()).sqrt()
    angle = torch.atan2(gy, gx) / math.pi * BINS % BINS
    low = angle.floor()
    share = angle - low
    low = low.long() % BINS
    flat = torch.zeros(len(x), BINS, *x.shape[2:], dtype=x.dtype)
    flat = flat.scatter_add(1, low, length * (1 - share)).scatter_add(
        1, (low + 1) % BINS, length * share
    )
    cells = F.avg_pool2d(flat, CELL)
    power = 4 * F.avg_pool2d(cells.square().sum(1, keepdim=True), 2, 1)
    corners = [
        cells[:, :, :-1, :-1],
        cells[:, :, 1:, :-1],
        cells[:, :, :-1, 1:],
        cells[:, :, 1:, 1:],
    ]
    return (torch.cat(corners, 1) / (power + 1e-3).sqrt()).clamp_max(LIMIT)


def mirrored_edges(blocks: Tensor) -> Tensor:
    """The blocks of the mirrored picture."""
    n, _, h, w = blocks.shape
    corners = blocks.reshape(n, 2, 2, BINS, h, w).flip(1)  # left and right change places
    return (
        corners[:, :, :, [(BINS - k) % BINS for k in range(BINS)]]
        .reshape(n, 4 * BINS, h, w)
        .flip(3)
    )


def responses(x: Tensor, filters: Tensor, offset: Tensor) -> Tensor:
    """How strongly each patch of the pictures, at unit contrast, answers to each filter: (n,
    filters, s - 5, s - 5).
    """
    mean = F.avg_pool2d(x.mean(1, keepdim=True), PATCH, 1)
    spread = F.avg_pool2d(x.square().mean(1, keepdim=True), PATCH, 1) - mean.square()
    return F.conv2d(x, filters) / (spread.clamp_min(0) + CONTRAST).sqrt() - offset[:, None, None]


def photo(x: Tensor, filters: Tensor, offset: Tensor) -> Tensor:
    """Edges, colours and patches of pictures (n, 3, 32, 32), the same for a picture and its mirror
    image: (n, 2184).

    The second half of the filters mirrors the first, so that the mirror image's answers are those
    of the picture in another order.
    """
    blocks = edges(x)
    blocks = (blocks + mirrored_edges(blocks))[..., :4] / 2
    colours = F.avg_pool2d(x, 8)
    colours = (colours + colours.flip(3))[..., :2] / 2
    answers = responses(x, filters, offset)
    half = len(filters) // 2
    parts = []
    for side in (answers, -answers):
        pooled = F.adaptive_avg_pool2d(F.relu(side - THRESHOLD), GRID)
        pooled = (pooled + torch.cat([pooled[:, half:], pooled[:, :half]], 1).flip(3)) / 2
        parts += [pooled[..., 0].flatten(1).sqrt(), pooled[:, :half, :, 1].flatten(1).sqrt()]
    return torch.cat([blocks.flatten(1), colours.flatten(1), *parts], 1)


def inked(x: Tensor) -> Tensor:
    """Light strokes on a dark ground: a picture whose rim is light is turned about."""
    rim = torch.cat([x[:, :, 0], x[:, :, -1], x[:, :, :, 0], x[:, :, :, -1]], 2).mean((1, 2))
    return torch.where((rim > 0.5)[:, None, None, None], 1 - x, x)


def boxed(x: Tensor) -> Tensor:
    """What a digit's strokes span, stretched over 8 x 8 means: (n, 1, 28, 28) to (n, 1, 8, 8). A
    narrow one is not made wide.
    """
    side = x.shape[-1]
    on = x[:, 0] > 0.2
    at = torch.arange(side)

    def span(any_on: Tensor) -> tuple[Tensor, Tensor]:
        low = torch.where(any_on, at, side).amin(1).clamp_max(side - 1)
        high = torch.where(any_on, at, -1).amax(1).clamp_min(0)
        return (low + high + 1) / 2, (high - low + 1).clamp_min(1).to(x.dtype)

    (y, height), (x0, width) = span(on.any(2)), span(on.any(1))
    width = torch.maximum(width, 0.3 * height)
    zero = torch.zeros_like(width)
    window = torch.stack(
        [width / side, zero, 2 * x0 / side - 1, zero, height / side, 2 * y / side - 1], 1
    ).reshape(-1, 2, 3)
    return F.avg_pool2d(
        F.grid_sample(
            x, F.affine_grid(window, [len(x), 1, 32, 32], align_corners=False), align_corners=False
        ),
        4,
    )


def strokes(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The last hidden layer, (n, 64), of the network of 8 x 8 digits (n, 1, 8, 8)."""
    (w1, b1), (w2, b2), (w3, b3), (w4, b4) = layers
    x = F.relu(F.conv2d(F.relu(F.conv2d(x, w1, b1, padding=1)), w2, b2, padding=1))
    x = F.relu(F.conv2d(F.max_pool2d(x, 2), w3, b3, padding=1))
    return F.relu(F.linear(F.max_pool2d(x, 2).flatten(1), w4, b4))
