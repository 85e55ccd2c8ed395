"""Convolution and max-pooling for the structured engine: outputs, gradients by inputs, and each
record's gradient by the weight.

Each call of cuDNN forbids TF32, whatever the process allows. A weight gradient is a product of
patches of the input and the gradient by the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Parameters = dict[str, Tensor]


def conv_known(layer: nn.Conv2d, axes: int) -> bool:
    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    pairs = [
        layer.kernel_size,
        layer.stride,
        layer.dilation,
        *([] if isinstance(layer.padding, str) else [layer.padding]),
    ]
    fits = (
        all(len(setting) == 2 and min(setting) >= 0 for setting in pairs)
        and tuple(layer.weight.shape) == shape
    )
    return axes == 4 and layer.padding_mode == "zeros" and fits


def conv_factor(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Return the patches of the padded input."""
    return _patches(layer, padded(layer, a.detach()))


def _patches(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """(B, groups, channels x kernel, places); where rows follow each other, strips (B, rows x width
    of the output, kernel width x channels), in which the patches of each kernel row are a slice.
    (Copies of strided views: on a CPU functional.unfold takes seven times as long.)
    """
    if _in_strips(layer):
        sw = layer.stride[1]
        dw = layer.dilation[1]
        kw = layer.kernel_size[1]
        width = _places(layer, a)[1]
        a = a.permute(0, 2, 3, 1).contiguous()
        record, row, column, channel = a.stride()
        strips = a.as_strided(
            (len(a), a.shape[1], width, kw, a.shape[3]),
            (record, row, sw * column, dw * column, channel),
        )
        return strips.reshape(len(a), a.shape[1] * width, -1)
    return patches(layer, a)


def patches(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """(B, groups, channels x kernel, places) of a padded input."""
    (sh, sw), (dh, dw), (kh, kw), (height, width) = (
        layer.stride,
        layer.dilation,
        layer.kernel_size,
        _places(layer, a),
    )
    a = a.contiguous()
    record, channel, row, column = a.stride()
    found = a.as_strided(
        (*a.shape[:2], kh, kw, height, width),
        (record, channel, dh * row, dw * column, sh * row, sw * column),
    )
    return found.reshape(len(a), layer.groups, -1, height * width)


def _in_strips(layer: nn.Conv2d) -> bool:
    return layer.stride[0] == 1 and layer.groups == 1


def padded(layer: nn.Conv2d, a: Tensor) -> Tensor:
    if isinstance(layer.padding, str):
        whole = [
            d * (k - 1) * (layer.padding == "same")
            for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
        ]
    else:
        whole = [2 * size for size in layer.padding]
    if any(whole):
        return functional.pad(
            a, [size for both in reversed(whole) for size in (both // 2, both - both // 2)]
        )
    return a


def _places(layer: nn.Conv2d, a: Tensor) -> list[int]:
    """Height and width of the output for a padded input."""
    return [
        (a.shape[2 + i] - layer.dilation[i] * (layer.kernel_size[i] - 1) - 1) // layer.stride[i] + 1
        for i in (0, 1)
    ]


class _Conv(torch.autograd.Function):
    """A convolution whose backward gives the gradient by the (padded) input alone."""

    @staticmethod
    def forward(
        ctx: Any, layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, a: Tensor
    ) -> Tensor:
        ctx.layer, ctx.weight, ctx.size = layer, weight, a.shape[2:]
        return convolution(layer, a, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, transposed(ctx.layer, gradients[0], ctx.weight, ctx.size)


def convolution(
    layer: nn.Conv2d, a: Tensor, weight: Tensor, bias: Tensor | None, spare: list[int] | None = None
) -> Tensor:
    """The convolution without padding; or with `spare`, the rows and columns at the end that no
    patch reaches, its transpose.

    With weights (S, *shape) of S silos, whose records follow each other, each has its own.
    """
    if a.is_meta:  # shapes alone are wanted, and not every torch has shapes for the call below
        return functional.conv2d(a, weight, bias, layer.stride, 0, layer.dilation, layer.groups)
    if weight.dim() == 5:
        if bias is None:
            biases = [None] * len(weight)
        else:
            biases = bias
        return torch.cat(
            [
                convolution(layer, *own, spare)
                for own in zip(a.chunk(len(weight)), weight, biases, strict=True)
            ]
        )
    benchmark = a.is_cuda
    deterministic = True
    cudnn = True
    allow_tf32 = False
    settings = (
        layer.stride,
        [0, 0],
        layer.dilation,
        spare is not None,
        spare or [0, 0],
        layer.groups,
    )
    return torch.ops.aten._convolution(
        a, weight, bias, *settings, benchmark, deterministic, cudnn, allow_tf32
    )


def transposed(layer: nn.Conv2d, e: Tensor, weight: Tensor, size: torch.Size) -> Tensor:
    """The gradient by a padded input of that size."""
    if (
        e.is_cuda and layer.stride == (1, 1) and layer.groups == 1
    ):  # as a convolution of the padded gradient: cuDNN is three times as fast
        (kh, kw), (dh, dw) = layer.kernel_size, layer.dilation
        turned = weight.flip(-2, -1).transpose(-4, -3).contiguous()
        around = functional.pad(e, (dw * (kw - 1), dw * (kw - 1), dh * (kh - 1), dh * (kh - 1)))
        return convolution(layer, around, turned, None)
    reach = [
        (e.shape[2 + i] - 1) * layer.stride[i] + layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        for i in (0, 1)
    ]
    return convolution(layer, e.contiguous(), weight, None, [size[i] - reach[i] for i in (0, 1)])


def conv_forward(layer: nn.Conv2d, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    return _Conv.apply(layer, p["weight"], p.get("bias"), padded(layer, a))  # type: ignore[return-value]


def conv_gradients(layer: nn.Conv2d, u: Tensor, e: Tensor) -> Tensor:
    if _in_strips(layer):
        step = layer.dilation[0] * e.shape[3]
        length = e.shape[2] * e.shape[3]
        rows = [
            torch.bmm(e.flatten(2), u[:, k * step : k * step + length])
            for k in range(layer.kernel_size[0])
        ]
        return torch.stack(rows, 1).unflatten(3, (-1, layer.in_channels)).permute(0, 2, 4, 1, 3)
    columns = torch.matmul(e.reshape(len(e), layer.groups, -1, u.shape[-1]), u.transpose(2, 3))
    return columns.view(len(e), *layer.weight.shape)


def max_pool(layer: nn.MaxPool2d, a: Tensor) -> Tensor:
    return _MaxPool.apply(layer, a) if a.device.type == "cpu" else layer(a)  # type: ignore[return-value]


def side_by_side(layer: nn.MaxPool2d) -> bool:
    return [*map(pair, (layer.stride, layer.padding, layer.dilation))] == [
        pair(layer.kernel_size),
        [0, 0],
        [1, 1],
    ] and not layer.ceil_mode


class _MaxPool(torch.autograd.Function):
    """Max-pooling on a CPU with the channels of all records side by side, over which torch's kernel
    for that layout vectorises.
    """

    @staticmethod
    def forward(ctx: Any, layer: nn.MaxPool2d, a: Tensor) -> Tensor:
        side = a.flatten(0, 1)[None].contiguous(memory_format=torch.channels_last)
        ctx.settings = (
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.ceil_mode,
        )
        found = torch.ops.aten.max_pool2d_with_indices(
            side, *(pair(v) for v in ctx.settings[:4]), layer.ceil_mode
        )
        z, places = (t.reshape(*a.shape[:2], *t.shape[2:]).contiguous() for t in found)
        ctx.save_for_backward(a, places)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        a, places = ctx.saved_tensors
        settings = (*(pair(v) for v in ctx.settings[:4]), ctx.settings[4])
        return None, torch.ops.aten.max_pool2d_with_indices_backward(
            gradients[0].contiguous(), a, *settings, places
        )


def pair(setting: int | tuple[int, ...]) -> list[int]:
    if isinstance(setting, int):
        both = [setting]
    else:
        both = [*setting]
    return both * 2 if len(both) == 1 else both
