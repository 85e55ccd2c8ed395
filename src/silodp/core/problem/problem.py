"""Define the problem to solve, f(w, x) = f0(w, x) + f1(w).

A torch model and a per-record loss make f0. A prox makes f1. Everything outside uses one flat
vector w. Only this file and `clipping` split it into a model's parameters.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import re
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from silodp.core.errors import BadInput
from silodp.core.extension import source
from silodp.core.problem.losses import WITH_PARAMETERS, Loss, slope_of
from silodp.core.problem.person import Person, filled
from silodp.core.problem.prox import Prox, Zero


class Problem:
    """f0 from `model` and `loss`, f1 from `prox`, on flat vectors w of length `dim`.

    The trainable parameters, in the order of model.named_parameters(), make w. Buffers and frozen
    parameters are public constants. The model is copied, so that the function cannot change
    later.

    - `loss` maps outputs (N, ...) and targets (N, ...) to (N,).
    - `schema` is the hash of what the features and the label mean. So server and silo cannot mean
      different columns.
    - `features` names the function that makes the features from raw ones, if there is one.
    - `zero` starts runs at zero, which is best for a convex problem.
    - `intercept` is added to the last coordinates of every start, which are then biases.
    - `person` makes a record a person, with features (P, ...) and targets (P,). The model and the
      loss see each row alone. f0 is the mean or the sum over the person's rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        prox: Prox | None = None,
        *,
        schema: str = "",
        features: str = "",
        zero: bool = False,
        person: Person | None = None,
        intercept: tuple[float, ...] = (),
    ) -> None:
        _refuse_unusable(model)
        self.model = copy.deepcopy(model)
        self.loss = loss
        self.slope = slope_of(loss)
        self.known_loss = self.slope is not None
        self.schema = schema
        self.features = features
        self.zero = zero
        self.person = person
        self.intercept = intercept
        if prox is None:
            prox = Zero()
        self.prox: Prox = prox
        self.shapes = {
            name: p.shape for name, p in self.model.named_parameters() if p.requires_grad
        }
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        self.dim = sum(self.sizes)

    @property
    def by_row(self) -> Problem:
        """Return the same problem for single rows.

        A model predicts for a row, never for a person.
        """
        if self.person is None:
            return self
        rows = copy.copy(self)
        rows.person = None
        return rows

    def initial(self, seeds: Sequence[int]) -> Tensor:
        """Return (J, d): one random start for each seed, drawn by the layers' own reset_parameters.

        The state of the global generator is restored. A parameter of a module without
        reset_parameters starts at its value in the model.
        """
        parameter = next(self.model.parameters())
        if self.zero:
            return self._shifted(parameter.new_zeros(len(seeds), self.dim))
        fresh = copy.deepcopy(self.model).cpu()
        points = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for seed in seeds:
                fresh.load_state_dict(self.model.state_dict())
                torch.default_generator.manual_seed(seed)
                for module in fresh.modules():
                    reset = getattr(module, "reset_parameters", None) or getattr(
                        module, "_reset_parameters", None
                    )
                    if callable(reset):
                        reset()
                points.append(
                    torch.cat([p.detach().flatten() for p in fresh.parameters() if p.requires_grad])
                )
        return self._shifted(torch.stack(points).to(parameter.device))

    def _shifted(self, w: Tensor) -> Tensor:
        """Return the points (J, d) plus the intercept."""
        if self.intercept:
            w[:, -len(self.intercept) :] += torch.tensor(self.intercept).to(w)
        return w

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """Return the parameters in w (*lead, d) by name, as views (*lead, *shape).

        Raise BadInput if w has another length.
        """
        if w.shape[-1] != self.dim:
            raise BadInput(
                f"w has {w.shape[-1]} coordinates; use {self.dim}, one for each trainable "
                "parameter of the model"
            )
        parts = w.split(self.sizes, dim=-1)
        return {
            name: part.reshape(*w.shape[:-1], *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def constants(self, like: Tensor) -> dict[str, Tensor]:
        """Return the buffers and frozen parameters by name.

        They are on the device of `like`. Floating ones have its dtype.
        """
        fixed = {
            name: p.detach() for name, p in self.model.named_parameters() if not p.requires_grad
        } | dict(self.model.named_buffers())
        moved: dict[str, Tensor] = {}
        for name, constant in fixed.items():
            if constant.is_floating_point():
                moved[name] = constant.to(like.device, like.dtype)
            else:
                moved[name] = constant.to(like.device)
        return moved

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """Return the model's outputs (J, n, k) at each of the points w (J, d).

        x (n, ...) has records, or rows of persons.
        """
        constants = self.constants(w)

        def one(point: Tensor) -> Tensor:
            return functional_call(self.model, self.split(point) | constants, (x,))

        if w.shape[0] == 1:
            return one(w[0])[None]
        return vmap(one)(w)

    def losses(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return f0(w, x) of each record, (J, n).

        w (J, d) has points, x (n, ...) records and y (n, ...) targets.
        """
        if self.person:
            each = self.by_row.losses(w, x.flatten(0, 1), filled(y).flatten())
            return self.person.loss(each.unflatten(1, y.shape), y)
        return vmap(self.record_losses, in_dims=(0, None))(self.outputs(w, x), y)

    def loss_of(self, w: Tensor, constants: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return f0(w, x) of one record alone, for a point w (d,).

        The model sees each row as a batch of one, so that it cannot mix rows.
        """
        parameters = self.split(w) | constants

        def row(x: Tensor, y: Tensor) -> Tensor:
            return self.record_loss(functional_call(self.model, parameters, (x[None],))[0], y)

        if self.person:
            return self.person.loss(vmap(row)(x, filled(y)), y)
        return row(x, y)

    def record_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each record (n,), from outputs (n, ...) and targets (n, ...).

        An unknown loss sees one record at a time.
        """
        if self.known_loss:
            return self.loss(output, target)
        return vmap(self.record_loss)(output, target)

    def record_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of one record or row, from its output and target without a record
        axis.
        """
        return self.loss(output[None], target[None]).sum()

    def definition(self) -> str:
        """Return a canonical text of f. Its hash names what a silo approved.

        It has the model, parameter shapes, constants, loss, prox, schema and torch version. Raise
        BadInput for a part that has no name in another process.
        """
        constants = {n: p for n, p in self.model.named_parameters() if not p.requires_grad} | dict(
            self.model.named_buffers()
        )
        lines = [
            f"torch {torch.__version__}",
            f"loss {_name(self.loss)}",
            f"prox {_prox_name(self.prox)}",
            f"model {self.model!r}",
        ]
        if self.schema:
            lines.append(f"schema {self.schema}")
        if self.features:
            lines.append(f"features {self.features}")
        if self.person:
            lines.append(f"person {self.person.rows} rows {self.person.combine}")
        mode = {True: "train", False: "eval"}
        lines += [
            f"mode {name or '.'} {mode[module.training]}"
            for name, module in self.model.named_modules()
        ]
        lines += [f"parameter {name} {tuple(shape)}" for name, shape in self.shapes.items()]
        lines += [
            f"constant {name} {tuple(c.shape)} {c.dtype} sha256 {_digest(c)}"
            for name, c in constants.items()
        ]
        return "\n".join(lines) + "\n"


def _refuse_unusable(model: nn.Module) -> None:
    """Raise BadInput for a model that mixes or remembers records, draws numbers or cannot be
    trained.
    """
    for name, module in model.named_modules():
        layer = f"layer {name!r} ({type(module).__name__})"
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise BadInput(
                f"{layer} mixes records, so one record's gradient depends on the others; use "
                "GroupNorm or LayerNorm"
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise BadInput(
                f"{layer} carries running statistics from record to record; use "
                "track_running_stats=False, or GroupNorm"
            )
        dropping = isinstance(module, _DropoutNd) and module.p > 0
        dropping |= isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0
        if (dropping or isinstance(module, nn.RReLU)) and module.training:
            raise BadInput(
                f"{layer} is random, but a gradient difference needs the same function twice; "
                "use p=0, or model.eval()"
            )
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if other := names.get(id(parameter)):
            raise BadInput(
                f"parameters {other!r} and {name!r} are one tensor; use a separate layer in each "
                "place"
            )
        names[id(parameter)] = name
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise BadInput(
            "the model has no trainable parameters; use one with a parameter that requires_grad"
        )
    if any(not p.is_floating_point() for p in trainable):
        raise BadInput(
            "the model has complex parameters; use real ones, for instance real and "
            "imaginary parts as two tensors"
        )


def _name(loss: object) -> str:
    """Return a name that means the same function in every process.

    Raise BadInput if there is none.
    """
    if isinstance(loss, nn.Module) or type(loss) in WITH_PARAMETERS:
        return f"{type(loss).__module__}.{loss!r}"
    # an object of a class in a user's own file
    if source(loss) and not hasattr(loss, "__qualname__"):
        return f"{source(loss)}.{shown(loss)}"
    if isinstance(loss, functools.partial):
        return f"partial({_name(loss.func)}, {loss.args!r}, {sorted(loss.keywords.items())!r})"
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', '<unnamed>')}"
    if "<" in name:
        raise BadInput(
            f"the loss {name} has no name in another process; use a function defined at the top "
            "level of a module"
        )
    return name


def _prox_name(prox: Prox) -> str:
    """Return the fields of a prox.

    If it, or a prox inside it, comes from a user's own file, add that file's hash.
    """
    sources = []
    inner = prox
    while inner is not None:
        sources.append(source(inner))
        inner = getattr(inner, "prox", None)
    if any(sources):
        return " ".join([shown(prox), *filter(None, sources)])
    return repr(prox)


def shown(thing: object) -> str:
    """Return an object as a definition shows it: its class and its numbers.

    Raise BadInput if it hides its numbers.
    """
    if " at 0x" in (text := repr(thing)):
        hidden = re.search(r"(\w+)(?: object)? at 0x", text)
        name = hidden[1] if hidden else type(thing).__name__
        raise BadInput(
            f"{name} does not show its numbers, so no officer can approve them; make it a "
            "frozen dataclass"
        )
    return text


def _digest(constant: Tensor) -> str:
    """Return the SHA-256 of a constant's bytes."""
    return hashlib.sha256(
        constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    ).hexdigest()
