import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.core.errors import BadInput
from silodp.core.problem.losses import SLOPES, cross_entropy, logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.core.problem.prox import L1, Zero


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def draws(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum(-1)


def test_w_holds_the_parameters_in_the_order_of_the_model():
    model = net()
    problem = Problem(model, cross_entropy)
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert problem.dim == len(w) == 4 * 5 + 5 + 5 * 3 + 3
    parts = problem.split(w.expand(2, 3, -1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parts[name], parameter.expand(2, 3, *parameter.shape))


def test_split_refuses_a_vector_of_another_length():
    with pytest.raises(BadInput, match="w has 7 coordinates; use 43"):
        Problem(net(), cross_entropy).split(torch.zeros(1, 7))


def test_outputs_and_losses_are_those_of_the_model_at_each_point():
    problem = Problem(net(), cross_entropy)
    w, x, y = draws(3, problem.dim), draws(6, 4), torch.tensor([0, 1, 2, 2, 1, 0])
    outputs, losses = problem.outputs(w, x), problem.losses(w, x, y)
    assert outputs.shape == (3, 6, 3)
    assert losses.shape == (3, 6)
    for j in range(3):
        model = net()
        nn.utils.vector_to_parameters(w[j], model.parameters())
        assert torch.allclose(outputs[j], model(x), atol=1e-5)
        assert torch.allclose(
            losses[j], functional.cross_entropy(model(x), y, reduction="none"), atol=1e-5
        )
        assert torch.allclose(problem.losses(w[j : j + 1], x, y)[0], losses[j], atol=1e-5)


def test_an_unknown_loss_sees_one_record_at_a_time():
    def centred(output: Tensor, target: Tensor) -> Tensor:
        return (output - output.mean(0)).square().sum(-1) + functional.cross_entropy(output, target)

    w, x, y = draws(2, 43), draws(5, 4), torch.tensor([0, 1, 2, 0, 1])
    assert torch.allclose(
        Problem(net(), centred).losses(w, x, y),
        Problem(net(), cross_entropy).losses(w, x, y),
        atol=1e-5,
    )


def test_the_model_is_copied():
    model = net()
    problem = Problem(model, cross_entropy)
    before = problem.initial([0])
    model[1] = nn.Dropout(0.5)
    nn.init.zeros_(model[0].weight)
    assert torch.equal(problem.initial([0]), before)
    assert isinstance(problem.model.get_submodule("1"), nn.Tanh)


def test_initial_points_follow_their_seeds_and_leave_the_global_generator_alone():
    problem = Problem(net(), cross_entropy)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    w = problem.initial([3, 4, 3])
    assert torch.equal(torch.get_rng_state(), state)
    assert w.shape == (3, problem.dim)
    assert not w.requires_grad
    assert torch.equal(w[0], w[2])
    assert not torch.equal(w[0], w[1])
    assert torch.equal(problem.initial([4])[0], w[1])
    torch.manual_seed(3)
    assert torch.equal(torch.cat([p.detach().flatten() for p in net().parameters()]), w[0])


def test_a_parameter_that_no_layer_resets_starts_where_the_model_has_it():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.full((), 7.0))
            self.line = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.gain * self.line(x)

    w = Problem(Scaled(), logistic).initial([0, 1])
    assert w[:, 0].tolist() == [7.0, 7.0]
    assert not torch.equal(w[0], w[1])


def test_frozen_parameters_and_buffers_are_constants():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    model[0].requires_grad_(False)
    problem = Problem(model, cross_entropy)
    assert problem.dim == 5 + 5 + 5 * 3 + 3
    w = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    x = draws(6, 4)
    assert torch.allclose(problem.outputs(w[None], x)[0], model(x))
    assert torch.allclose(
        problem.outputs(w[None].double(), x.double())[0].float(), model(x), atol=1e-6
    )
    assert not torch.equal(*problem.initial([0, 1]))


def test_the_prox_is_delegated_and_zero_by_default():
    w = draws(2, 43)
    assert torch.equal(Problem(net(), cross_entropy).prox(w, 0.1), w)
    assert torch.equal(Problem(net(), cross_entropy, L1(0.5)).prox(w, 0.1), L1(0.5)(w, 0.1))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)),
            r"layer '1' \(BatchNorm1d\) mixes records.*use GroupNorm or LayerNorm",
        ),
        (
            nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False)).eval(),
            "mixes records",
        ),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.SyncBatchNorm(1)), "mixes records"),
        (
            nn.Sequential(nn.Conv2d(1, 1, 1), nn.InstanceNorm2d(1, track_running_stats=True)),
            "running statistics.*use track_running_stats=False",
        ),
        (
            nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1)),
            r"layer '1' \(Dropout\) is random.*use p=0, or model.eval\(\)",
        ),
        (nn.Sequential(nn.Linear(4, 5), nn.RReLU()), "is random"),
        (nn.LSTM(4, 5, num_layers=2, dropout=0.1), "is random"),
        (nn.Sequential(nn.ReLU()), "no trainable parameters"),
        (nn.Linear(4, 5).requires_grad_(False), "no trainable parameters"),
        (nn.Linear(4, 5, dtype=torch.complex64), "complex parameters"),
    ],
)
def test_models_that_mix_records_or_are_random_are_refused(model, sentence):
    with pytest.raises(BadInput, match=sentence):
        Problem(model, cross_entropy)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).eval(),
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.0)),
        nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)).eval(),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.InstanceNorm2d(1)),
        nn.Sequential(nn.Linear(4, 5), nn.GroupNorm(1, 5), nn.LayerNorm(5)),
    ],
)
def test_models_that_treat_each_record_alone_are_accepted(model):
    assert Problem(model, cross_entropy).dim > 0


def test_the_definition_names_everything_that_makes_the_function():
    torch.manual_seed(0)
    text = Problem(net(), cross_entropy).definition()
    assert text == Problem(net(), cross_entropy, Zero()).definition()
    for word in (
        "silodp.core.problem.losses.cross_entropy",
        "Zero()",
        "Tanh()",
        "parameter 0.weight (5, 4)",
        f"torch {torch.__version__}",
    ):
        assert word in text
    frozen = [
        nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 3)) for _ in range(2)
    ]
    others = [
        Problem(m, cross_entropy)
        for m in (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), net().eval(), *frozen)
    ]
    others += [
        Problem(net(), squared_error),
        Problem(net(), cross_entropy, L1(0.1)),
        Problem(net(), nn.CrossEntropyLoss(reduction="none")),
    ]
    others += [
        Problem(net(), functools.partial(functional.cross_entropy, label_smoothing=s))
        for s in (0.1, 0.2)
    ]
    others += [Problem(net(), absolute_error)]
    assert len({text, *(p.definition() for p in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: output.sum(-1),
        functools.partial(lambda output, target: output.sum(-1)),
    ],
)
def test_a_loss_without_a_name_has_no_definition(loss):
    with pytest.raises(BadInput, match="use a function defined at the top level of a module"):
        Problem(net(), loss).definition()


@pytest.mark.parametrize("loss", SLOPES)
def test_slopes_are_the_gradients_of_the_losses(loss):
    outputs = draws(2, 3, 1 if loss is logistic else 4, 5).double().requires_grad_()
    target = (
        torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 7, 0]])
        if loss is cross_entropy
        else draws(2, 5, outputs.shape[2]).double()
    )
    target = (
        torch.randint(2, (2, 5), generator=torch.Generator().manual_seed(0))
        if loss is logistic
        else target
    )
    total = sum(loss(outputs[s, j].T, target[s]).nansum() for s in range(2) for j in range(3))
    (expected,) = torch.autograd.grad(total, outputs)
    assert torch.allclose(SLOPES[loss](outputs.detach(), target), expected)


def test_losses_agree_with_torch():
    z, y = draws(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    assert torch.allclose(cross_entropy(z, y), functional.cross_entropy(z, y, reduction="none"))
    bits = (y > 0).float()
    assert torch.allclose(
        logistic(z[:, :1], bits),
        functional.binary_cross_entropy_with_logits(z[:, 0], bits, reduction="none"),
    )
    assert torch.allclose(squared_error(z, 2 * z), z.square().sum(-1))
    assert torch.allclose(squared_error(z[:, :1], bits), (z[:, 0] - bits) ** 2)
    assert cross_entropy(z, y + 1).isnan().tolist() == [False, False, True, True, False, False]


def test_a_layer_used_twice_is_refused():
    """torch leaves a module with tied weights changed after a functional call."""
    shared = nn.Linear(3, 3)
    with pytest.raises(BadInput, match="one tensor"):
        Problem(nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 1)), squared_error)
