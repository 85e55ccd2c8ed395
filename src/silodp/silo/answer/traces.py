"""What the layers of a known model are given, and the slopes of each record's loss by what they
give: the floats of which `products` makes integers.

A pass is a function of its arguments alone, and keeps nothing: chunks may be passed by several
threads at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.engine.blocks import Residual, SelfAttention
from silodp.engine.convolution import Parameters, conv_known, side_by_side
from silodp.engine.model import AXES, Node, read

LAYERS = nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm
Trace = dict[str, tuple[Tensor, Tensor]]
"""By the layer's name: what it is given and what it gives, or the slopes by that."""


class Tracer:
    """Passes of a model of known layers and a known loss, in float32 on one device."""

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        """BadInput if anything in the model, or the loss, is not known to treat each record alone
        there.
        """
        root = read(problem)
        if root is None or not problem.known_loss:
            raise BadInput("the model is not made of known layers with a known loss")
        self.problem = problem
        self.device = torch.device(device)
        self._root = root
        self.layers: dict[str, tuple[nn.Module, dict[str, str]]] = {}
        """Trained layers by name, each with the model's names of its parameters."""
        self._walk(root)
        if sum(len(names) for _, names in self.layers.values()) != len(problem.shapes):
            raise BadInput("a parameter belongs to no known layer")

    def _walk(self, node: Node) -> None:
        module = node.module
        if node.names:
            own = {short: full for short, full in node.names.items() if full in self.problem.shapes}
            known = type(module) in LAYERS and (not own or own == node.names)
            if isinstance(module, nn.Conv2d):
                known &= module.groups == 1 and conv_known(module, 4)
            if not known:
                raise BadInput("a layer is of no known kind")
            if own:
                self.layers[_name(node)] = module, own
        if self.device.type == "cuda" and not _without_atomics(module):
            raise BadInput("on a GPU a module adds in no fixed order")
        for child in node.children:
            self._walk(child)

    def parameters(self, w: Tensor) -> Parameters:
        """All numbers of the model at the point w (1, d), in float32."""
        own = {
            name: p.squeeze(0) for name, p in self.problem.split(w.to(self.device).float()).items()
        }
        return own | self.problem.constants(torch.empty(0, device=self.device))

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Trace]:
        """Outputs, and what each trained layer was given and gave."""
        seen: Trace = {}
        with torch.enable_grad():
            return self._through(self._root, parameters, x, seen), seen

    def _through(self, node: Node, parameters: Parameters, a: Tensor, seen: Trace) -> Tensor:
        module = node.module
        given = a
        if type(module) in (nn.Sequential, Residual):
            for child in node.children:
                a = self._through(child, parameters, a, seen)
            if type(module) is not Residual:
                return a
            if a.shape != given.shape:
                raise BadInput(
                    "what is added to a residual has another shape, and would be broadcast"
                )
            return given + a
        if not node.names:
            if a.dim() != AXES.get(
                type(module), a.dim()
            ):  # else it would be broadcast along the records
                raise BadInput("a module is given another number of axes than it is known with")
            return module(a)
        made = _layer(module, {short: parameters[full] for short, full in node.names.items()}, a)
        if (name := _name(node)) in self.layers:
            if made.requires_grad:
                made = made
            else:
                made = made.detach().requires_grad_()
            seen[name] = given, made
        return made

    def traced(self, parameters: Parameters, x: Tensor, y: Tensor) -> Trace:
        """Of every layer its input and the slopes by its output."""
        output, seen = self.forward(parameters, x.float())
        with torch.enable_grad():
            losses = self.problem.record_losses(output, y.float() if y.is_floating_point() else y)
            if losses.shape != (len(x),):
                raise BadInput("the loss is not one number for each record")
            slopes = torch.autograd.grad(
                losses.sum(), [made for _, made in seen.values()], allow_unused=True
            )
        return {
            name: (given.detach(), torch.zeros_like(made) if e is None else e)
            for (name, (given, made)), e in zip(seen.items(), slopes, strict=True)
        }


def _name(node: Node) -> str:
    return next(iter(node.names.values())).rpartition(".")[0]


def _layer(module: nn.Module, own: Parameters, a: Tensor) -> Tensor:
    weight = own.get("weight")
    bias = own.get("bias")
    match module:
        case nn.Linear():
            assert weight is not None
            return functional.linear(a, weight, bias)
        case nn.Conv2d():
            if a.dim() != 4:
                raise BadInput(
                    "a convolution is given another number of axes than it is known with"
                )
            assert weight is not None
            return functional.conv2d(
                a, weight, bias, module.stride, module.padding, module.dilation
            )  # type: ignore[arg-type]
        case nn.LayerNorm():
            return functional.layer_norm(a, module.normalized_shape, weight, bias, module.eps)
    assert isinstance(module, nn.GroupNorm)
    return functional.group_norm(a, module.num_groups, weight, bias, module.eps)


def _without_atomics(module: nn.Module) -> bool:
    """Whether torch's kernels for a GPU add what flows back through the module in a fixed order."""
    pooled = type(module) is not nn.MaxPool2d or side_by_side(module)
    return pooled and type(module) not in (nn.AdaptiveAvgPool2d, SelfAttention)
