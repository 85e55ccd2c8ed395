"""An algorithm's signature is its declaration: what it releases, and what can be set.

    def momentum(fed, problem, w, *, rounds: int, step: Number, momentum: Number, minibatch:
    Gaussian) -> Iterator[Tensor]

takes a federation to ask, a problem for its prox, and points w (J, d). Of the keyword-only
parameters those annotated `Gaussian` are its kinds of release, `step` is the step, and all others
are settings. A setting named by one of the users' WORDS has that word's default and bounds; any
other has the default in the signature, and bounds and help by `Annotated[int, Setting(least=1,
help="...")]`.
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
    """A number or word that shapes an algorithm: its bounds, and what is said of a value outside of
    them.
    """

    default: Any = None
    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    finite: bool = False
    help: str = ""
    label: str = ""
    note: str = ""
    """In brackets after the bounds."""
    because: str = ""
    """Said instead of the bounds, after "but"."""
    type: type = float

    def parse(self, name: str, given: Any) -> Any:
        """The value given, or what a text says; BadInput unless it is of the type and within the
        bounds.
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
        raise BadInput(
            f"{label} is {shown}; it must be {wanted}{f' ({self.note})' if self.note else ''}"
        )


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
"""What users say, in every command, whatever the algorithm; it takes those that its signature
names. Their defaults are an Order's, their help is in `cli/options.py`."""


@dataclass(frozen=True)
class Algorithm:
    """A generator with what its signature declares. `name` is what finds it again: a name, or
    FILE.py:NAME.

    With `disjoint` it habitually asks each round of a batch of its own: its release is
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
        """What the signature of `run` declares; BadInput says what keeps it from being an
        algorithm.
        """
        if not inspect.isgeneratorfunction(run):
            raise BadInput(
                f"{name} is no algorithm; an algorithm is a function (fed, problem, w, *, "
                "step, ...) that yields points"
            )
        hints = get_type_hints(run, include_extras=True)
        taken = inspect.signature(run).parameters.values()
        own = [p for p in taken if p.kind is p.KEYWORD_ONLY]
        kinds = {p.name: hint for p in own if _plain(hint := hints.get(p.name)) is Gaussian}
        if len(
            [p for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        ) != 3 or "step" not in (p.name for p in own):
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
            p.name: _setting(name, p, hints.get(p.name))
            for p in own
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
        """The settings that this algorithm takes, out of all that a user may give (None: not
        given); what cannot be run is refused.

        Values may be texts, as in `--set decay=0.9`. WORDS that the algorithm does not take must
        make sense too; other names must be its own.
        """
        said = {name: value for name, value in given.items() if value is not None}
        if unknown := [name for name in said if name not in WORDS and name not in self.settings]:
            raise BadInput(
                f"{self.name} has no setting {unknown[0]!r}; it has "
                f"{', '.join(self.settings) or 'none'}"
            )
        said = {
            name: WORDS[name].parse(name, value) if name in WORDS else value
            for name, value in said.items()
        }
        found = {}
        for name, setting in self.settings.items():
            value = said.get(name, setting.default)
            if value is None:
                if setting.help:
                    said_of = f" ({setting.help.rstrip('.')})"
                else:
                    said_of = ""
                raise BadInput(
                    f"{self.name} needs the setting {name!r}{said_of}; give --set {name}=VALUE"
                )
            found[name] = setting.parse(name, value)
        rounds = found.get("rounds", math.inf)
        if found.get("phase", 1) > rounds:
            raise BadInput(
                f"phase is {found['phase']} but there are only {rounds} rounds; choose a "
                f"phase between 1 and {rounds}"
            )
        epoch = found.get("inner", 1) * found.get("restarts", 1)
        if rounds < epoch and "inner" not in found:
            raise BadInput(
                f"{rounds} rounds are fewer than {epoch} restarts; use fewer restarts or "
                "more rounds"
            )
        if rounds < epoch:
            raise BadInput(
                f"{rounds} rounds are less than one epoch of {epoch} inner steps; use "
                "fewer inner steps or more rounds"
            )
        return found


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE texts of `--set` as a table; BadInput if one is none, or a name comes twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not (equals and name.isidentifier() and value.strip()) or name in found:
            raise BadInput(
                f"--set {text!r} is not NAME=VALUE, each name once, such as --set decay=0.99"
            )
        found[name] = value.strip()
    return found


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return get_args(hint)[0]
    return hint


def _setting(name: str, parameter: inspect.Parameter, hint: Any) -> Setting:
    """The word's, or what `Annotated` says, with the type of the annotation and the default of the
    signature.
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
    kind = kind or (word.type if word else type(default) if type(default) in TYPES else float)
    if default is not None:
        own = default
    elif setting.default is not None:
        own = setting.default
    elif word:
        own = word.default
    else:
        own = None
    return replace(setting, type=kind, default=own)
