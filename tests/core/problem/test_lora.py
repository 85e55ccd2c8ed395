"""LoRA: what is frozen stays, what is trained is small, and records do not mix."""

import pytest
import torch
from torch import nn

from silodp.core.errors import BadInput
from silodp.core.mechanisms import Gaussian
from silodp.core.privacy.accounting import Budget
from silodp.core.problem.lora import lora
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.server.algorithms.mb_sgd import mb_sgd
from silodp.server.plan import calibrate
from silodp.silo.data.records import Records
from silodp.simulation.connect import simulate


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (4, 8)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Flatten(),
    )


def test_an_adapted_module_starts_as_the_module_and_trains_few_parameters():
    frozen, x = transformer(), torch.randn(5, 32)
    adapted = lora(frozen, 2)
    assert torch.allclose(adapted(x), frozen(x), atol=1e-5)
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == 2 * (8 + 16) * 2
    assert all(p.requires_grad for p in frozen.parameters()), (
        "the module that was given is left as it was"
    )


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # attention has no batched form in torch.func
def test_adapters_and_a_head_are_trained_privately_and_the_rest_is_part_of_the_definition():
    problem = Problem(nn.Sequential(lora(transformer(), 1), nn.Linear(32, 2)), cross_entropy)
    assert problem.dim == 2 * (8 + 16) + 66
    frozen = {name: c.clone() for name, c in problem.constants(torch.zeros(1)).items()}
    assert any(
        "linear1.layer.weight" in line
        for line in problem.definition().splitlines()
        if line.startswith("constant")
    )
    x = torch.randn(2, 60, 32)
    records = Records.of([(part, (part[:, 0] > 0).long()) for part in x])
    mechanisms = {"minibatch": Gaussian("minibatch", 1.0, 0.0)}

    def run(fed, problem, w, **mechanisms):
        return mb_sgd(fed, problem, w, rounds=20, step=1.0, **mechanisms)

    plan = calibrate(run, mechanisms, [[Budget(200.0, 1e-3)] * 2], records.counts)
    fed, ledger = simulate(problem, records, plan, [0])
    w = problem.initial([0])
    before = float(problem.losses(w, x[0], records.y[0]).mean())
    *_, w = run(fed, problem, w, **plan.mechanisms)
    assert float(problem.losses(w, x[0], records.y[0]).mean()) < before - 0.1
    assert float(ledger.epsilon().max()) <= 200.0 * (1 + 1e-6)
    assert all(torch.equal(c, frozen[name]) for name, c in problem.constants(w).items())


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(BadInput, match=r"no nn.Linear inside"):
        lora(nn.Sequential(nn.ReLU()), 2)
    with pytest.raises(BadInput, match="the rank is 0"):
        lora(transformer(), 0)
