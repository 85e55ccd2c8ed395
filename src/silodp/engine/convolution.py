"""Compute convolution and max-pooling for the structured engine.

There are outputs, gradients by inputs, and each record's gradient by the weight. Each call of cuDNN
forbids TF32, whatever the process allows. A weight gradient is a product of patches of the input
and the gradient by the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Parameters = dict[str, Tensor]


def conv_known(layer: nn.Conv2d, axes: int) -> bool:
    """Return whether the rules cover the layer's settings, for an input of so many axes."""
    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    pairs = [layer.kernel_size, layer.stride, layer.dilation]
    if not isinstance(layer.padding, str):
        pairs.append(layer.padding)
    fits = (
        all(len(setting) == 2 and min(setting) >= 0 for setting in pairs)
        and tuple(layer.weight.shape) == shape
    )
    return axes == 4 and layer.padding_mode == "zeros" and fits


def conv_factor(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Return the patches of the padded input."""
    return _patches(layer, padded(layer, a.detach()))


def _patches(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Return the patches in the form that `conv_gradients` takes.

    They are (B, groups, channels x kernel, places). With stride 1 down the rows and one group, they
    are strips (B, rows x width of the output, kernel width x channels), in which the patches of
    each kernel row are a slice. (Both copy strided views: on a CPU functional.unfold takes seven
    times as long.)
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
    """Return the patches (B, groups, channels x kernel, places) of a padded input."""
    sh, sw = layer.stride
    dh, dw = layer.dilation
    kh, kw = layer.kernel_size
    height, width = _places(layer, a)
    a = a.contiguous()
    record, channel, row, column = a.stride()
    views = a.as_strided(
        (*a.shape[:2], kh, kw, height, width),
        (record, channel, dh * row, dw * column, sh * row, sw * column),
    )
    return views.reshape(len(a), layer.groups, -1, height * width)


def _in_strips(layer: nn.Conv2d) -> bool:
    """Return whether the layer's patches are made as strips."""
    return layer.stride[0] == 1 and layer.groups == 1


def padded(layer: nn.Conv2d, a: Tensor) -> Tensor:
    """Return the input with the layer's padding."""
    if isinstance(layer.padding, str):
        totals = [
            d * (k - 1) * (layer.padding == "same")
            for d, k in zip(layer.dilation, layer.kernel_size, strict=True)
        ]
    else:
        totals = [2 * size for size in layer.padding]
    if not any(totals):
        return a
    # `pad` takes the last axis first. Of an odd total, the end gets the larger half.
    sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return functional.pad(a, sides)


def _places(layer: nn.Conv2d, a: Tensor) -> list[int]:
    """Return the height and width of the output for a padded input."""
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
        """Return the convolution of a padded input."""
        ctx.layer = layer
        ctx.weight = weight
        ctx.size = a.shape[2:]
        return convolution(layer, a, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by the padded input, and None for the other arguments."""
        return None, None, None, transposed(ctx.layer, gradients[0], ctx.weight, ctx.size)


def convolution(
    layer: nn.Conv2d, a: Tensor, weight: Tensor, bias: Tensor | None, spare: list[int] | None = None
) -> Tensor:
    """Return the convolution without padding, or its transpose.

    With `spare`, the rows and columns at the end that no patch reaches, it is the transpose. With
    weights (S, *shape) of S silos, whose records follow each other, each silo has its own.
    """
    if a.is_meta:  # only shapes are needed, and not every torch has shapes for the call below
        return functional.conv2d(a, weight, bias, layer.stride, 0, layer.dilation, layer.groups)
    if weight.dim() == 5:
        if bias is None:
            biases = [None] * len(weight)
        else:
            biases = bias
        silos = zip(a.chunk(len(weight)), weight, biases, strict=True)
        return torch.cat([convolution(layer, *silo, spare) for silo in silos])
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
    """Return the gradient by a padded input of that size."""
    if e.is_cuda and layer.stride == (1, 1) and layer.groups == 1:
        # As a convolution of the padded gradient, cuDNN is three times as fast.
        kh, kw = layer.kernel_size
        dh, dw = layer.dilation
        turned = weight.flip(-2, -1).transpose(-4, -3).contiguous()
        around = functional.pad(e, (dw * (kw - 1), dw * (kw - 1), dh * (kh - 1), dh * (kh - 1)))
        return convolution(layer, around, turned, None)
    reach = [
        (e.shape[2 + i] - 1) * layer.stride[i] + layer.dilation[i] * (layer.kernel_size[i] - 1) + 1
        for i in (0, 1)
    ]
    return convolution(layer, e.contiguous(), weight, None, [size[i] - reach[i] for i in (0, 1)])


def conv_forward(layer: nn.Conv2d, p: Parameters, a: Tensor, u: Tensor) -> Tensor:
    """Return the layer's output."""
    return _Conv.apply(layer, p["weight"], p.get("bias"), padded(layer, a))  # type: ignore[return-value]


def conv_gradients(layer: nn.Conv2d, u: Tensor, e: Tensor) -> Tensor:
    """Return each record's gradient by the weight, (B, *shape)."""
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
    """Return the layer's output. A CPU takes a faster way."""
    if a.device.type == "cpu":
        return _MaxPool.apply(layer, a)  # type: ignore[return-value]
    return layer(a)


def side_by_side(layer: nn.MaxPool2d) -> bool:
    """Return whether the layer's windows neither overlap nor leave gaps."""
    return (
        pair(layer.stride) == pair(layer.kernel_size)
        and pair(layer.padding) == [0, 0]
        and pair(layer.dilation) == [1, 1]
        and not layer.ceil_mode
    )


class _MaxPool(torch.autograd.Function):
    """Max-pooling on a CPU with the channels of all records side by side.

    torch's kernel for that layout vectorises over them.
    """

    @staticmethod
    def forward(ctx: Any, layer: nn.MaxPool2d, a: Tensor) -> Tensor:
        """Return the maximum of each window."""
        side = a.flatten(0, 1)[None].contiguous(memory_format=torch.channels_last)
        ctx.settings = (
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.ceil_mode,
        )
        pooled = torch.ops.aten.max_pool2d_with_indices(
            side, *(pair(v) for v in ctx.settings[:4]), layer.ceil_mode
        )
        z, places = (t.reshape(*a.shape[:2], *t.shape[2:]).contiguous() for t in pooled)
        ctx.save_for_backward(a, places)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient by the input, and None for the layer."""
        a, places = ctx.saved_tensors
        settings = (*(pair(v) for v in ctx.settings[:4]), ctx.settings[4])
        return None, torch.ops.aten.max_pool2d_with_indices_backward(
            gradients[0].contiguous(), a, *settings, places
        )


def pair(setting: int | tuple[int, ...]) -> list[int]:
    """Return a setting as two numbers, for height and width."""
    if isinstance(setting, int):
        return [setting, setting]
    if len(setting) == 1:
        return [*setting, *setting]
    return [*setting]
