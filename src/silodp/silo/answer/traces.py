"""Trace a known model: the inputs of its layers, and each record's slopes of the loss by their
outputs.

`products` makes integers of these floats. A pass is a function of its arguments alone, and stores
nothing. So several threads may pass chunks at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.core.errors import BadInput
from silodp.core.problem.problem import Problem
from silodp.engine.convolution import Parameters, conv_known, side_by_side
from silodp.engine.model import AXES, Node, Residual, SelfAttention, read

LAYERS = nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm
Trace = dict[str, tuple[Tensor, Tensor]]
"""By the layer's name: its input, and its output or the slopes by its output."""


class Tracer:
    """Passes of a model of known layers and a known loss, in float32 on one device."""

    def __init__(self, problem: Problem, device: str = "cpu") -> None:
        """Read the model's layers.

        Raise BadInput if anything in the model, or the loss, is not known to treat each record
        alone there.
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
        """Register the trained layers of this node. Raise BadInput for an unknown layer."""
        module = node.module
        if node.names:
            trained = {
                short: full for short, full in node.names.items() if full in self.problem.shapes
            }
            supported = type(module) in LAYERS and (not trained or trained == node.names)
            if isinstance(module, nn.Conv2d):
                supported &= module.groups == 1 and conv_known(module, 4)
            if not supported:
                raise BadInput("a layer is of no known kind")
            if trained:
                self.layers[_name(node)] = module, trained
        if self.device.type == "cuda" and not _without_atomics(module):
            raise BadInput("on a GPU a module adds in no fixed order")
        for child in node.children:
            self._walk(child)

    def parameters(self, w: Tensor) -> Parameters:
        """Return all numbers of the model at the point w (1, d), in float32."""
        trained = self.problem.split(w.to(self.device).float())
        parameters = {name: values.squeeze(0) for name, values in trained.items()}
        return parameters | self.problem.constants(torch.empty(0, device=self.device))

    def forward(self, parameters: Parameters, x: Tensor) -> tuple[Tensor, Trace]:
        """Return the outputs, and the input and output of each trained layer."""
        trace: Trace = {}
        with torch.enable_grad():
            return self._through(self._root, parameters, x, trace), trace

    def _through(self, node: Node, parameters: Parameters, a: Tensor, trace: Trace) -> Tensor:
        module = node.module
        given = a
        if type(module) in (nn.Sequential, Residual):
            for child in node.children:
                a = self._through(child, parameters, a, trace)
            if type(module) is not Residual:
                return a
            if a.shape != given.shape:
                raise BadInput(
                    "what is added to a residual has another shape, and would be broadcast"
                )
            return given + a
        if not node.names:
            # Another number of axes would be broadcast along the records.
            if a.dim() != AXES.get(type(module), a.dim()):
                raise BadInput("a module is given another number of axes than it is known with")
            return module(a)
        output = _layer(module, {short: parameters[full] for short, full in node.names.items()}, a)
        name = _name(node)
        if name in self.layers:
            if not output.requires_grad:
                output = output.detach().requires_grad_()
            trace[name] = given, output
        return output

    def traced(self, parameters: Parameters, x: Tensor, y: Tensor) -> Trace:
        """Return every layer's input and the slopes by its output."""
        output, trace = self.forward(parameters, x.float())
        if y.is_floating_point():
            y = y.float()
        with torch.enable_grad():
            losses = self.problem.record_losses(output, y)
            if losses.shape != (len(x),):
                raise BadInput("the loss is not one number for each record")
            outputs = [layer_output for _, layer_output in trace.values()]
            slopes = torch.autograd.grad(losses.sum(), outputs, allow_unused=True)
        traced: Trace = {}
        for (name, (given, layer_output)), slope in zip(trace.items(), slopes, strict=True):
            if slope is None:  # the loss does not depend on this layer
                slope = torch.zeros_like(layer_output)
            traced[name] = (given.detach(), slope)
        return traced


def _name(node: Node) -> str:
    return next(iter(node.names.values())).rpartition(".")[0]


def _layer(module: nn.Module, parameters: Parameters, a: Tensor) -> Tensor:
    weight = parameters.get("weight")
    bias = parameters.get("bias")
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
    """Return whether GPU kernels add what flows back through the module in a fixed order."""
    pooled = type(module) is not nn.MaxPool2d or side_by_side(module)
    return pooled and type(module) not in (nn.AdaptiveAvgPool2d, SelfAttention)
