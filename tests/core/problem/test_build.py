"""Words become a Problem in one place: names of what ships, and FILE.py:NAME."""

import hashlib
from pathlib import Path

import pytest
import torch

from silodp.core.errors import BadInput
from silodp.core.features.feature_map import feature_map
from silodp.core.problem.build import Words, build
from silodp.core.problem.models import model_by_name
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import Part, by_name
from silodp.core.problem.task import Task
from silodp.host.extension import load
from silodp.testing.prox import check_prox

OWN = '''
from dataclasses import dataclass

import torch
from torch import nn

from silodp.core.problem.prox import L1

known = L1(0.25)


@dataclass(frozen=True)
class Near:
    """Stay near zero."""

    strength: float

    def value(self, w):
        return self.strength / 2 * w.square().sum(-1)

    def __call__(self, w, step):
        return w / (1 + self.strength * step)


class Unseen(Near):
    __repr__ = object.__repr__


@dataclass(frozen=True)
class Above:
    level: float

    def __call__(self, output, target):
        return (output[..., 0] - target - self.level).square()


def absolute(output, target):
    return (output[..., 0] - target).abs()


def closure(level):
    return lambda output, target: (output[..., 0] - target).abs() * level


def net(features, outputs, hidden=3):
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def squares(x):
    return torch.cat([x, x.square()])


def unsound(x):
    return x / 0


def no_model(features, outputs):
    return "a model"
'''


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def made(own: str, width: int = 2, classes: int = 0, **words: str) -> Problem:
    words = {"model": "linear", **{name: text.replace("OWN", own) for name, text in words.items()}}
    return build(Words(task=Task.plain(classes), **words), width, load=load)


@pytest.mark.parametrize(
    ("model", "classes", "prox"),
    [("linear", 0, "zero"), ("logistic", 2, "l1:0.1"), ("mlp:4", 3, "part:0:3:box:0:1")],
)
def test_words_of_what_ships_have_the_definition_that_they_had(model, classes, prox):
    found = build(Words(model, Task.plain(classes), prox), 5, load=load)
    assert (
        found.definition() == Problem(*model_by_name(model, 5, classes), by_name(prox)).definition()
    )


def test_a_model_in_a_file_is_called_with_features_outputs_and_numbers(own):
    assert made(own, model="OWN:net", classes=3).dim == 2 * 3 + 3 + 3 * 3 + 3
    assert made(own, model="OWN:net:7", classes=3).dim == 2 * 7 + 7 + 7 * 3 + 3


def test_a_prox_in_a_file_passes_the_public_check_and_is_named_by_its_source(own):
    problem = made(own, prox="OWN:Near:0.5")
    check_prox(problem.prox, dim=4)
    source = hashlib.sha256(OWN.encode()).hexdigest()
    assert f"prox Near(strength=0.5) silodp_extension_{source}\n" in problem.definition()
    part = made(own, prox="part:0:2:OWN:Near:0.5")
    assert isinstance(part.prox, Part)
    assert source in part.definition()
    assert f"prox {by_name('l1:0.25')!r}\n" in made(own, prox="OWN:known").definition()


def test_a_loss_in_a_file_is_named_by_its_source(own):
    problem = made(own, loss="OWN:absolute")
    source = hashlib.sha256(OWN.encode()).hexdigest()
    assert f"loss silodp_extension_{source}.absolute\n" in problem.definition()
    assert not problem.known_loss, "the engine shows it single records"
    assert (
        f"loss silodp_extension_{source}.Above(level=0.5)\n"
        in made(own, loss="OWN:Above:0.5").definition()
    )


def test_another_source_is_another_definition(own):
    words = {"prox": "OWN:Near:0.5", "loss": "OWN:absolute", "features": "OWN:squares"}
    before = {name: made(own, **{name: text}).definition() for name, text in words.items()}
    other = Path(own).with_name("other.py")
    other.write_text(OWN + "# another\n")
    for name, text in words.items():
        assert made(str(other), **{name: text}).definition() != before[name]
    same = Path(own).with_name("same.py")
    same.write_text(OWN)
    for name, text in words.items():
        assert made(str(same), **{name: text}).definition() == before[name], (
            "a file's name is nobody's business"
        )


def test_features_are_made_row_by_row_and_widen_the_model(own):
    assert made(own, features="OWN:squares").dim == 2 * 2 + 1
    x = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    assert torch.equal(feature_map(f"{own}:squares", load).of(x), torch.cat([x, x.square()], 1))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"model": "OWN:no_model"}, "must take .features, outputs. and return a torch.nn.Module"),
        ({"model": "OWN:absent"}, "has no 'absent'"),
        ({"model": "OWN:net:0:0"}, "the call of \\w+ fails"),
        ({"model": "absent.py:net"}, "cannot be read"),
        ({"prox": "OWN:absolute"}, "is not a prox"),
        ({"prox": "OWN:Near"}, "the call of \\w+ fails"),
        ({"prox": "OWN:Near:x"}, "the call of \\w+ fails"),
        (
            {"prox": "OWN:Unseen:0.1"},
            "^Unseen does not show its numbers, .*; make it a frozen dataclass$",
        ),
        ({"prox": "part:0:2:OWN:Unseen:0.1"}, "^Unseen does not show its numbers"),
        ({"loss": "absolute"}, "must be FILE.py:NAME"),
        ({"loss": "OWN:squares"}, "cannot be run"),
        ({"loss": "OWN:closure:0.5"}, "has no name in another process"),
        ({"features": "squares"}, "or FILE.py:NAME"),
        ({"features": "OWN:unsound"}, "finite numbers"),
        ({"loss": "OWN:dataclass"}, "no officer has approved"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(own, words, sentence):
    with pytest.raises(BadInput, match=sentence):
        made(own, **words)
