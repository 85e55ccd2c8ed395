"""Words become a Problem here, and nowhere else: model, loss, prox and task, each a name of something that ships or FILE.py:NAME.

Nothing is read here: `load` finds what FILE.py calls NAME, and whose copy of the file that is, is for the caller to say. A server and the lab
take `silodp.host.extension.load`; a gate takes a copy that it has approved by its hash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silodp.core.errors import BadInput
from silodp.core.extension import is_file, made, parse, source
from silodp.core.problem.losses import Loss
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import Prox, by_name
from silodp.core.problem.schema import Schema
from silodp.core.problem.task import Task

Load = Callable[[str], Any]


@dataclass(frozen=True)
class Words:
    """What is learnt, in words. `loss` is the task's own by default; `features` maps a record's raw features to those that the model sees.

    model: linear, logistic, additive:KNOTS, mlp:HIDDEN, cnn, or FILE.py:NAME, called with (features, outputs). prox: as `prox.by_name` has it, or
    FILE.py:NAME:PARAMETERS. loss: FILE.py:NAME. features: FILE.py:NAME, a public function of one record's features (k,).
    """

    model: str
    task: Task | Schema
    prox: str = "zero"
    loss: str = ""
    features: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        """Those of the words that are FILE.py:NAME."""
        return tuple(text for text in (self.model, self.loss, self.prox, self.features) if is_file(text))


def build(words: Words, features: int, *, load: Load) -> Problem:
    """The Problem that the words name, for records of so many raw features. What a FILE.py makes is tried on zeros."""
    schema = words.task if isinstance(words.task, Schema) else None
    task, shape = (words.task.task, words.task.shape) if isinstance(words.task, Schema) else (words.task, ())
    mapped = feature_map(words.features, load) if words.features else None
    if mapped:
        features, shape = mapped.width(features), ()
    if is_file(words.model):
        outputs, loss = task.head()
        model = made(words.model, load, features, outputs)
        if not isinstance(model, nn.Module):
            raise BadInput(
                f"{words.model} returned {type(model).__name__}; it should take (features, outputs) and return a torch.nn.Module"
            )
    else:
        model, loss = model_by_name(words.model, features, task, shape, schema.numbers if schema and not mapped else None)
    loss = loss_by_name(words.loss, load) if words.loss else loss
    problem = Problem(
        model, loss, prox_by_name(words.prox, load), schema=schema.hash if schema else "", features=mapped.source if mapped else ""
    )
    if words.files:
        _try(words, problem, features, task)
    return problem


def prox_by_name(text: str, load: Load) -> Prox:
    """As prox.by_name; FILE.py:NAME:0.1 is NAME(0.1), an object with `value` and `__call__`."""

    def own(text: str) -> Prox:
        prox = _named(text, made(text, load))
        if not all(callable(getattr(prox, name, None)) for name in ("value", "__call__")):
            raise BadInput(f"{text} is no prox; it should have value(w) and __call__(w, step)")
        return prox

    return by_name(text, own)


def loss_by_name(text: str, load: Load) -> Loss:
    """FILE.py:NAME, a function of outputs (N, k) and targets (N, ...) to (N,); FILE.py:NAME:0.1 is the function NAME(0.1)."""
    if not is_file(text):
        raise BadInput(f"the loss is {text!r}, but must be FILE.py:NAME; leave it out for the loss of the task")
    loss = _named(text, made(text, load))
    if not hasattr(loss, "__call__"):  # noqa: B004 -- `callable` would hide its type
        raise BadInput(f"{text} is no loss; it should take outputs (N, k) and targets (N, ...) to one number per record, (N,)")
    return loss


@dataclass(frozen=True)
class FeatureMap:
    """A public function of one record's raw features, the same for every record and fixed before any is seen."""

    text: str
    function: Callable[[Tensor], Tensor]

    @property
    def source(self) -> str:
        """What names the function in a problem's definition: the hash of its file, and its name."""
        return f"{getattr(self.function, '__module__', '')}.{parse(self.text)[1]}"

    def width(self, features: int) -> int:
        """The number of features that it makes of so many, tried on zeros."""
        return self.of(torch.zeros(1, features)).shape[1]

    def of(self, x: Tensor) -> Tensor:
        """Rows (n, k) to (n, m), each row shown to the function alone; BadInput, without a word of a record, if it fails or gives no finite row."""
        try:
            rows = [torch.as_tensor(self.function(row.clone()), dtype=x.dtype) for row in x]
            found = torch.stack(rows) if rows else x
        except Exception as error:
            raise BadInput(f"the features {self.text} cannot be made ({type(error).__name__}); mend the function") from None
        if found.dim() != 2 or not bool(found.isfinite().all()):
            raise BadInput(f"the features {self.text} must be a vector of finite numbers for every record; bound them in the function")
        return found


def feature_map(text: str, load: Load) -> FeatureMap:
    if not is_file(text):
        raise BadInput(f"the features are {text!r}, but must be FILE.py:NAME, a function of one record's features")
    function = _named(text, made(text, load))
    if not hasattr(function, "__call__"):  # noqa: B004
        raise BadInput(f"{text} is no function; it should take one record's features (k,) to others (m,)")
    return FeatureMap(text, function)


def _named(text: str, thing: Any) -> Any:
    """What comes from a file is known by that file's hash, or is one that ships: what a third file holds, nobody has approved."""
    module = getattr(getattr(thing, "func", thing), "__module__", "") or ""
    if not source(getattr(thing, "func", thing)) and module.partition(".")[0] not in ("silodp", "torch"):
        raise BadInput(f"{text} is defined in {module or 'no module'}, whose source nobody has approved; define it in the file itself")
    return thing


def _try(words: Words, problem: Problem, features: int, task: Task) -> None:
    """One step of everything on zeros: what cannot be run is said before anybody waits for it."""
    w = problem.initial([0])
    y = torch.zeros(2, dtype=w.dtype if task.kind in ("regression", "count") else torch.long)
    named = ", ".join(words.files)
    try:
        with torch.no_grad():
            loss, moved, f1 = problem.losses(w, torch.zeros(2, features, dtype=w.dtype), y), problem.prox(w, 0.5), problem.prox.value(w)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{named} cannot be run ({type(error).__name__}: {' '.join(str(error).split())}); mend it") from None
    if (loss.shape, moved.shape, f1.shape) != ((1, 2), w.shape, (1,)):
        raise BadInput(f"{named}: a loss should give one number per record, a prox a point as long as the one that it takes")
    problem.definition()  # refuses what has no name that another process could know
