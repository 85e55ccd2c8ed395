"""A model and a loss of a user's own are tried as a run uses them: what a run would trip over, or
learn nothing from, is one sentence.
"""

import pytest

from silodp.core.errors import BadInput
from silodp.core.problem.build import Words, build
from silodp.core.problem.losses import logistic
from silodp.core.problem.task import Task
from silodp.host.extension import load

OWN = """
import torch
from torch import nn
from torch.nn import functional


def ce(output, target):
    return functional.cross_entropy(output, target.long(), reduction="none")


def mean(output, target):
    return functional.cross_entropy(output, target.long())


def bce(output, target):
    return functional.binary_cross_entropy_with_logits(output[:, 0], target.to(output.dtype), reduction="none")


def hot(output, target):
    return -(output.log_softmax(-1) * functional.one_hot(target.long(), output.shape[-1])).sum(-1)


def wide(output, target):
    return output - target[:, None]


def square(output, target):
    return (output - target) ** 2


def root(output, target):
    return (output[:, 0] - output[:, 0].detach() - 1 - target).sqrt()


def logs(output, target):
    return (output[:, 0] - target.log()).square()


def centred(output, target):
    found = ce(output, target)
    return found - found.mean()


def nothing(output, target):
    return None


def net(features, outputs):
    return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, outputs))


def one(features, outputs):
    return nn.Linear(features, 1)


def more(features, outputs):
    return nn.Linear(features, outputs + 1)


def flat(features, outputs):
    return nn.Sequential(nn.Linear(features, 1), nn.Flatten(0))


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Asking(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(functional.dropout(x, 0.5))


class Endless(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Word(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.table = nn.Embedding(10, outputs)

    def forward(self, x):
        return self.table(x.long()).mean(1)
"""  # noqa: E501


@pytest.fixture
def made(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def made(model, loss="", classes=2):
        words = (
            f"{tmp_path}/own.py:{text[4:]}" if text.startswith("own:") else text
            for text in (model, loss)
        )
        named, loss = words
        return build(Words(named, Task.plain(classes), loss=loss), 5, load=load)

    return made


@pytest.mark.parametrize(
    ("model", "loss", "classes", "sentence"),
    [
        (
            "logistic",
            "own:ce",
            2,
            (
                r"the loss \S*own.py:ce cannot be run on label 1 of a model with 1 output "
                r"\(IndexError: .*\); logistic has one"
            ),
        ),
        ("logistic", "own:ce", 3, ""),
        (
            "mlp:2",
            "own:hot",
            3,
            (
                "hot runs on one record, but cannot be differentiated for records side by side "
                ".*; use only tensor operations"
            ),
        ),
        (
            "mlp:2",
            "own:wide",
            3,
            (
                r"wide gives numbers of shape \(1, 3\) for one record; it must give one "
                r"number per record"
            ),
        ),
        ("linear", "own:square", 0, r"square gives numbers of shape \(1, 1\) for one record"),
        ("mlp:2", "own:nothing", 3, "nothing gives NoneType for one record"),
        ("logistic", "own:root", 2, "root is not finite at the start on label 0"),
        ("linear", "own:root", 0, "root is not finite at the start on target 0.0"),
        ("linear", "own:logs", 0, ""),
        (
            "mlp:2",
            "own:centred",
            3,
            (
                r"centred mixes records: it gives numbers of shape \(3,\) for 3 records, other "
                r"than for each alone"
            ),
        ),
        ("mlp:2", "own:mean", 3, ""),
        ("logistic", "own:bce", 2, ""),
        ("own:net", "own:ce", 2, ""),
        ("own:net", "", 0, ""),
        ("own:one", "own:bce", 2, ""),
        (
            "own:one",
            "",
            3,
            (
                r"the model \S*own.py:one gives outputs of shape \(3, 1\) for 3 records, but "
                r"this task needs \(3, 3\)"
            ),
        ),
        (
            "own:more",
            "own:ce",
            2,
            (
                r"the model \S*own.py:more gives outputs of shape \(3, 3\) for 3 records, but "
                r"this task needs \(3, 2\)"
            ),
        ),
        ("own:flat", "", 0, r"flat gives outputs of shape \(3,\) for 3 records"),
        ("own:Mixing", "", 2, "the model .*Mixing mixes records"),
        (
            "own:Asking",
            "",
            2,
            "Asking runs on one record, but cannot be differentiated for records side by side",
        ),
        ("own:Drawing", "", 2, "Drawing mixes records|Drawing runs on one record"),
        ("own:Endless", "", 2, "Endless gives outputs that are not finite at the start"),
        ("own:Pair", "", 2, "Pair gives tuple for 3 records"),
        ("own:Word", "", 2, ""),
    ],
)
def test_what_a_run_would_trip_over_is_refused_and_nothing_else(
    made, model, loss, classes, sentence
):
    if not sentence:
        assert made(model, loss, classes).dim
        return
    with pytest.raises(BadInput, match=sentence) as said:
        made(model, loss, classes)
    assert "\n" not in str(said.value)


def test_one_output_for_two_classes_is_a_logit(made):
    assert made("own:one").loss is logistic
