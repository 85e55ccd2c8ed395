"""The declaration of an algorithm by its signature: what it releases, and what can be set.

    def momentum(
        fed, problem, w, *, rounds: int, step: Number, momentum: Number, minibatch: Gaussian
    ) -> Iterator[Tensor]

An algorithm takes a federation to ask, a problem for its prox, and points w (J, d). Its
keyword-only parameters are its declaration. Those annotated `Gaussian` are its kinds of release.
`step` is the step size. All others are settings.

A setting with a name in WORDS has the default and the bounds of that word. Any other setting has
the default of the signature. `Annotated[int, Setting(least=1, help="...")]` gives its bounds and
its help.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.sampling import DisjointBatches
from silodp.server.order import USUAL, Order

TYPES: tuple[type, ...] = (bool, int, float, str)


@dataclass(frozen=True)
class Setting:
    """A number or word that shapes an algorithm: its default, its bounds and its messages."""

    default: Any = None
    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    finite: bool = False
    help: str = ""
    label: str = ""
    note: str = ""
    """Shown in brackets after the bounds, in a message about a wrong value."""
    because: str = ""
    """Shown instead of the bounds, after "but"."""
    type: type = float

    def parse(self, name: str, given: Any) -> Any:
        """Return the value in the setting's type. A text is converted.

        Raise BadInput if a text does not fit the type, or if a number is outside the bounds.
        """
        label = self.label or name
        value = given
        if isinstance(given, str) and self.type is not str:
            try:
                if self.type is bool:
                    value = {"true": True, "false": False}[given.lower()]
                else:
                    value = self.type(given)
            except (KeyError, ValueError):
                kind = {bool: "true or false", int: "a whole number", float: "a number"}[self.type]
                raise BadInput(f"{label} is {given!r}; it must be {kind}") from None
        if self.type in (int, float):
            self._check(label, value)
        return value

    def _check(self, label: str, value: float) -> None:
        """Raise BadInput if the number is outside the bounds."""
        bounds = (
            (self.least > -math.inf, value >= self.least, f"{self.least:g} or more"),
            (self.above > -math.inf, value > self.above, f"greater than {self.above:g}"),
            (self.below < math.inf, value < self.below, f"less than {self.below:g}"),
            (self.most < math.inf, value <= self.most, f"at most {self.most:g}"),
            (self.finite, math.isfinite(value), "finite"),
        )
        if all(holds for stated, holds, _ in bounds if stated):
            return
        if isinstance(value, int):
            shown = str(value)
        else:
            shown = f"{value:g}"
        if self.because:
            raise BadInput(f"{label} is {shown}, but {self.because}")
        wanted = ", and ".join(words for stated, _, words in bounds if stated)
        if self.note:
            wanted = f"{wanted} ({self.note})"
        raise BadInput(f"{label} is {shown}; it must be {wanted}")


WORDS: dict[str, Setting] = {
    "rounds": Setting(USUAL["rounds"], least=1, type=int),
    "phase": Setting(Order.phase, least=1, type=int),
    "local_steps": Setting(Order.local_steps, least=1, type=int, label="local steps"),
    "inner": Setting(Order.inner, least=1, type=int, label="inner steps"),
    "restarts": Setting(Order.restarts, least=1, type=int),
    "slope": Setting(Order.slope, above=0, note="inf to clip at 2 L alone"),
    "momentum": Setting(USUAL["momentum"], least=0, below=1),
    "kappa": Setting(Order.kappa, above=0, most=1, note="which is mb-sgd"),
}
"""The settings with an option in every command. An algorithm takes those that its signature names.
Their defaults are those of an Order. Their help is in `cli/options.py`.
"""


@dataclass(frozen=True)
class Algorithm:
    """A generator with the declaration of its signature.

    `name` finds the algorithm again. It is a name of ALGORITHMS, or FILE.py:NAME. `kinds` are the
    names of its releases. `summary` is the first sentence of its docstring. `disjoint` is true if
    each round uses a batch of its own by default: one release is then annotated
    `Annotated[Gaussian, DisjointBatches]`.
    """

    name: str
    run: Callable[..., Iterator[Tensor]]
    kinds: tuple[str, ...]
    settings: Mapping[str, Setting] = field(hash=False)
    summary: str
    disjoint: bool = False

    @classmethod
    def of(cls, run: Any, name: str) -> Algorithm:
        """Return the algorithm that the signature of `run` declares.

        Raise BadInput if `run` is no generator function, if its arguments are not those of an
        algorithm, or if it declares no release.
        """
        if not inspect.isgeneratorfunction(run):
            raise BadInput(
                f"{name} is no algorithm; an algorithm is a function (fed, problem, w, *, "
                "step, ...) that yields points"
            )
        hints = get_type_hints(run, include_extras=True)
        taken = inspect.signature(run).parameters.values()
        declared = [p for p in taken if p.kind is p.KEYWORD_ONLY]
        positional = [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        hint_of = {p.name: hints.get(p.name) for p in declared}
        kinds = {name: hint for name, hint in hint_of.items() if _plain(hint) is Gaussian}
        if len(positional) != 3 or "step" not in hint_of:
            raise BadInput(
                f"{name} must take (fed, problem, w, *, step, ...), with `step` and all "
                "others by keyword only"
            )
        if not kinds:
            raise BadInput(
                f"{name} declares no release; annotate a keyword-only parameter with "
                "Gaussian for each kind that it makes"
            )
        settings = {
            p.name: _setting(name, p, hint_of[p.name])
            for p in declared
            if p.name not in kinds and p.name != "step"
        }
        disjoint = any(
            DisjointBatches in get_args(hint)[1:]
            for hint in kinds.values()
            if get_origin(hint) is Annotated
        )
        summary = " ".join((inspect.getdoc(run) or "").split()).partition(". ")[0].rstrip(".")
        return cls(name, run, tuple(kinds), settings, summary, disjoint)

    def schedule(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for each setting of this algorithm, given or default.

        A value may be a text, as in `--set decay=0.9`. None stands for a setting that is not given.
        A word of WORDS that the algorithm does not take is checked, and left out.

        Raise BadInput for an unknown setting, a value outside the bounds, a setting without a
        value, or a combination that leaves no round.
        """
        values = {name: value for name, value in given.items() if value is not None}
        if unknown := [name for name in values if name not in WORDS and name not in self.settings]:
            raise BadInput(
                f"{self.name} has no setting {unknown[0]!r}; it has "
                f"{', '.join(self.settings) or 'none'}"
            )
        for name in values:
            if name in WORDS:
                values[name] = WORDS[name].parse(name, values[name])
        chosen = {}
        for name, setting in self.settings.items():
            value = values.get(name, setting.default)
            if value is None:
                if setting.help:
                    meaning = f" ({setting.help.rstrip('.')})"
                else:
                    meaning = ""
                raise BadInput(
                    f"{self.name} needs the setting {name!r}{meaning}; give --set {name}=VALUE"
                )
            chosen[name] = setting.parse(name, value)
        rounds = chosen.get("rounds", math.inf)
        if chosen.get("phase", 1) > rounds:
            raise BadInput(
                f"phase is {chosen['phase']} but there are only {rounds} rounds; choose a "
                f"phase between 1 and {rounds}"
            )
        epoch = chosen.get("inner", 1) * chosen.get("restarts", 1)
        if rounds < epoch and "inner" not in chosen:
            raise BadInput(
                f"{rounds} rounds are fewer than {epoch} restarts; use fewer restarts or "
                "more rounds"
            )
        if rounds < epoch:
            raise BadInput(
                f"{rounds} rounds are less than one epoch of {epoch} inner steps; use "
                "fewer inner steps or more rounds"
            )
        return chosen


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """Return the values of `--set NAME=VALUE` texts by name.

    Raise BadInput if a text is not NAME=VALUE, or if a name occurs twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not (equals and name.isidentifier() and value.strip()) or name in values:
            raise BadInput(
                f"--set {text!r} is not NAME=VALUE, each name once, such as --set decay=0.99"
            )
        values[name] = value.strip()
    return values


def _plain(hint: Any) -> Any:
    """Return the annotation without its `Annotated`."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[0]
    return hint


def _setting(name: str, parameter: inspect.Parameter, hint: Any) -> Setting:
    """Return the setting that a parameter declares.

    Bounds and help come from `Annotated`, or from the word of this name. The type comes from the
    annotation, and the default from the signature, with the word's default as the last choice.
    Raise BadInput if no setting can have the annotated type.
    """
    word = WORDS.get(parameter.name)
    if parameter.default is parameter.empty:
        default = None
    else:
        default = parameter.default
    if get_origin(hint) is Annotated:
        stated = next((s for s in get_args(hint)[1:] if isinstance(s, Setting)), None)
    else:
        stated = None
    plain = _plain(hint)
    if get_origin(plain) in (Union, UnionType):
        choices = get_args(plain)
    else:
        choices = (plain,)
    kind = next((t for t in TYPES if t in choices), None)
    if plain is not None and kind is None:
        raise BadInput(
            f"{name}: the setting {parameter.name!r} is a {plain}; annotate it with int, "
            "float, bool or str"
        )
    setting = stated or word or Setting()
    if kind is None:
        if word:
            kind = word.type
        elif type(default) in TYPES:
            kind = type(default)
        else:
            kind = float
    if default is None:
        default = setting.default
    if default is None and word:
        default = word.default
    return replace(setting, type=kind, default=default)
