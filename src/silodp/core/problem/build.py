"""Build a Problem from words, and nowhere else: model, loss, prox and task.

Each word names something that ships, or FILE.py:NAME. Nothing is read here. `load` finds what
FILE.py calls NAME, and the caller decides which copy of the file that is. A server and a simulation
pass `silodp.host.extension.load`. A gate passes a copy that it has approved by its hash.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from silodp.core.errors import BadInput
from silodp.core.extension import approved, instantiate, is_file
from silodp.core.problem.losses import Loss
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import Prox, by_name
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Words:
    """The words that define a problem.

    - model: linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:NAME, which is called
      with (features, outputs).
    - prox: a spec of `prox.by_name`, or FILE.py:NAME:PARAMETERS.
    - loss: FILE.py:NAME, or "" for the task's own loss.
    - features: photo:M, digit, or FILE.py:NAME, a public function of one record's features (k,). It
      maps a record's raw features to the features that the model sees.
    """

    model: str
    task: Task | Schema
    prox: str = "zero"
    loss: str = ""
    features: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """Return those of the words that are FILE.py:NAME."""
        return tuple(
            text for text in (self.model, self.loss, self.prox, self.features) if is_file(text)
        )


def build(words: Words, features: int, *, load: Load) -> Problem:
    """Return the Problem that the words name, for records of so many raw features.

    What a FILE.py defines is tried on made-up records. Raise BadInput if it fails or cannot be
    used.
    """
    task: Task
    shape: tuple[int, ...] = ()
    numbers: tuple[int, ...] | None = None
    schema_hash = ""
    person = None
    if isinstance(words.task, Schema):
        task = words.task.task
        shape = words.task.shape
        numbers = words.task.numbers
        schema_hash = words.task.hash
        person = words.task.person
    else:
        task = words.task
    source = ""
    if words.features:
        from silodp.core.features.feature_map import feature_map

        mapped = feature_map(words.features, load, shape)
        source = mapped.source
        features = mapped.width(features)
        # the model sees the map's features, which are neither pictures nor columns
        shape = ()
        numbers = None
    if is_file(words.model):
        model, loss = _own_model(words.model, load, features, task)
    else:
        model, loss = model_by_name(words.model, features, task, shape, numbers)
    if words.loss:
        loss = loss_by_name(words.loss, load)
    problem = Problem(
        model,
        loss,
        prox_by_name(words.prox, load),
        schema=schema_hash,
        features=source,
        zero=words.model in ("linear", "logistic"),
        person=person,
        intercept=() if words.files else _intercept(task),
    )
    if words.files:
        _try(words, problem, features, task)
    return problem


def _intercept(task: Task) -> tuple[float, ...]:
    """Return what is publicly known of the outputs for everybody. Ready models end in a layer with
    a bias.

    Of two classes it is the logit of the public estimate of how frequent the second is, as training
    weighs the classes. Of survival times it is the logit of each period's hazard, when half of the
    records have their event by the end. A period four times as long then has twice the hazard: some
    people choose periods of equal lengths, and some choose periods of equally many events.
    Otherwise it is empty.
    """
    if task.periods:
        parts = [math.sqrt(length) for length in task.periods]
        return tuple(math.log(math.expm1(math.log(2) * part / sum(parts))) for part in parts)
    if not task.positive:
        return ()
    first, second = task.weights or (1.0, 1.0)
    return (math.log(task.positive * second / ((1 - task.positive) * first)),)


def prox_by_name(text: str, load: Load) -> Prox:
    """Return the prox that the text names, as prox.by_name does.

    FILE.py:NAME:0.1 is NAME(0.1), an object with `value` and `__call__`. Raise BadInput for another
    text or object.
    """

    def from_file(text: str) -> Prox:
        """Return the prox that a file defines. Raise BadInput if it lacks a method."""
        prox = approved(text, instantiate(text, load))
        if not all(callable(getattr(prox, name, None)) for name in ("value", "__call__")):
            raise BadInput(f"{text} is not a prox; it must have value(w) and __call__(w, step)")
        return prox

    return by_name(text, from_file)


def loss_by_name(text: str, load: Load) -> Loss:
    """Return the loss that FILE.py:NAME names.

    It is a function of outputs (N, k) and targets (N, ...) to (N,). FILE.py:NAME:0.1 is the
    function NAME(0.1). Raise BadInput for another text or object.
    """
    if not is_file(text):
        raise BadInput(
            f"the loss is {text!r}, but must be FILE.py:NAME; leave it out for the loss of the task"
        )
    loss = approved(text, instantiate(text, load))
    if not hasattr(loss, "__call__"):  # noqa: B004 -- `callable` would hide its type
        raise BadInput(
            f"{text} is not a loss; it must map outputs (N, k) and targets (N, ...) to one "
            "number per record, (N,)"
        )
    return loss


def _own_model(text: str, load: Load, features: int, task: Task) -> tuple[nn.Module, Loss]:
    """Return the model that a file makes, and the loss for its outputs.

    It has one output for each class, or one logit for two classes. Raise BadInput if it is not a
    module, fails or has outputs of another shape.
    """
    from silodp.core.problem.trial import ROWS, made_up, try_model

    wanted, loss = task.head()
    model = instantiate(text, load, features, wanted)
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"{text} returned {type(model).__name__}; it must take (features, outputs) and "
            "return a torch.nn.Module"
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
    """Try the loss on every label, and one step of the prox.

    Raise BadInput if one cannot be run, so that the user sees it before a run starts.
    """
    from silodp.core.problem.trial import ROWS, made_up, reporting, targets, try_loss

    problem = problem.by_row
    w = problem.initial([0])
    if is_file(words.model) or words.loss:
        one = task.classes == 2 and words.model.partition(":")[0] in ("logistic", "additive")
        if one:
            hint = f"{words.model} has one output for two classes, the logit of the second"
        else:
            hint = "correct it"
        x = made_up(ROWS, features).to(w.dtype)
        if words.loss:
            name = f"the loss {words.loss}"
        else:
            name = f"the loss of {words.model}"
        try_loss(problem, x, targets(task, w.dtype), name, hint)
    with reporting(f"the prox {words.prox} cannot be run"):
        moved = problem.prox(w, 0.5)
        f1 = problem.prox.value(w)
        if (moved.shape, f1.shape) != (w.shape, (1,)):
            raise BadInput(
                f"the prox {words.prox} gives a point of shape {tuple(moved.shape)} and a value "
                f"of shape {tuple(f1.shape)}; they must have the shapes {tuple(w.shape)} and (1,)"
            )
    problem.definition()  # refuses a part that has no name in another process
