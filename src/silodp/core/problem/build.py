"""Words become a Problem here, and nowhere else: model, loss, prox and task, each a name of
something that ships or FILE.py:NAME.

Nothing is read here: `load` finds what FILE.py calls NAME, and whose copy of the file that is, is
for the caller to say. A server and the lab take `silodp.host.extension.load`; a gate takes a copy
that it has approved by its hash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from silodp.core.errors import BadInput
from silodp.core.extension import approved, is_file, made
from silodp.core.problem.losses import Loss
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import Prox, by_name
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Words:
    """What is learnt, in words. `loss` is the task's own by default; `features` maps a record's raw
    features to those that the model sees.

    model: linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:NAME, called with
    (features, outputs). prox: as `prox.by_name` has it, or FILE.py:NAME:PARAMETERS. loss:
    FILE.py:NAME. features: photo:M, digit, or FILE.py:NAME, a public function of one record's
    features (k,).
    """

    model: str
    task: Task | Schema
    prox: str = "zero"
    loss: str = ""
    features: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """Those of the words that are FILE.py:NAME."""
        return tuple(
            text for text in (self.model, self.loss, self.prox, self.features) if is_file(text)
        )


def build(words: Words, features: int, *, load: Load) -> Problem:
    """The Problem that the words name, for records of so many raw features. What a FILE.py makes is
    tried on made-up records.
    """
    if isinstance(words.task, Schema):
        schema = words.task
    else:
        schema = None
    if isinstance(words.task, Schema):
        task = words.task.task
        shape = words.task.shape
    else:
        task = words.task
        shape = ()
    mapped = None
    if words.features:
        from silodp.core.features.feature_map import feature_map

        mapped = feature_map(words.features, load, shape)
    if mapped:
        features = mapped.width(features)
        shape = ()
    if is_file(words.model):
        model, loss = _own_model(words.model, load, features, task)
    else:
        model, loss = model_by_name(
            words.model, features, task, shape, schema.numbers if schema and not mapped else None
        )
    if words.loss:
        loss = loss_by_name(words.loss, load)
    else:
        loss = loss
    about = {"schema": schema.hash if schema else "", "features": mapped.source if mapped else ""}
    unit = schema.person if schema else None
    zero = words.model in ("linear", "logistic")
    problem = Problem(model, loss, prox_by_name(words.prox, load), **about, zero=zero, person=unit)
    if words.files:
        _try(words, problem, features, task)
    return problem


def prox_by_name(text: str, load: Load) -> Prox:
    """As prox.by_name; FILE.py:NAME:0.1 is NAME(0.1), an object with `value` and `__call__`."""

    def own(text: str) -> Prox:
        prox = approved(text, made(text, load))
        if not all(callable(getattr(prox, name, None)) for name in ("value", "__call__")):
            raise BadInput(f"{text} is no prox; it should have value(w) and __call__(w, step)")
        return prox

    return by_name(text, own)


def loss_by_name(text: str, load: Load) -> Loss:
    """FILE.py:NAME, a function of outputs (N, k) and targets (N, ...) to (N,); FILE.py:NAME:0.1 is
    the function NAME(0.1).
    """
    if not is_file(text):
        raise BadInput(
            f"the loss is {text!r}, but must be FILE.py:NAME; leave it out for the loss of the task"
        )
    loss = approved(text, made(text, load))
    if not hasattr(loss, "__call__"):  # noqa: B004 -- `callable` would hide its type
        raise BadInput(
            f"{text} is no loss; it should take outputs (N, k) and targets (N, ...) to one "
            "number per record, (N,)"
        )
    return loss


def _own_model(text: str, load: Load, features: int, task: Task) -> tuple[nn.Module, Loss]:
    """The model that a file makes and the loss for its outputs: one for each class, or of two
    classes one logit.
    """
    from silodp.core.problem.trial import ROWS, made_up, try_model

    wanted, loss = task.head()
    model = made(text, load, features, wanted)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{text} returned {type(model).__name__}; it should take (features, outputs) "
            "and return a torch.nn.Module"
        )
    problem = Problem(model, loss)
    x = made_up(ROWS, features).to(problem.initial([0]).dtype)
    shape = tuple(try_model(problem, x, f"the model {text}").shape[1:])
    wanted, loss = task.head(one_logit=shape == (1,))
    if shape != (wanted,):
        raise BadInput(
            f"the model {text} gives outputs of shape {(ROWS, *shape)} for {ROWS} records, "
            f"but this task needs {(ROWS, wanted)}"
        )
    return model, loss


def _try(words: Words, problem: Problem, features: int, task: Task) -> None:
    """The loss on every label and one step of the prox: what cannot be run is said before anybody
    waits for it.
    """
    from silodp.core.problem.trial import ROWS, made_up, said, targets, try_loss

    problem, w = problem.by_row, problem.initial([0])
    if is_file(words.model) or words.loss:
        one = task.classes == 2 and words.model.partition(":")[0] in ("logistic", "additive")
        if one:
            hint = f"{words.model} has one output for two classes, the logit of the second"
        else:
            hint = "mend it"
        x = made_up(ROWS, features).to(w.dtype)
        if words.loss:
            name = f"the loss {words.loss}"
        else:
            name = f"the loss of {words.model}"
        try_loss(problem, x, targets(task, w.dtype), name, hint)
    with said(f"the prox {words.prox} cannot be run"):
        moved = problem.prox(w, 0.5)
        f1 = problem.prox.value(w)
        if (moved.shape, f1.shape) != (w.shape, (1,)):
            raise BadInput(
                f"the prox {words.prox} should give a point as long as the one that it "
                "takes, and of that point one value"
            )
    problem.definition()  # refuses what has no name that another process could know
