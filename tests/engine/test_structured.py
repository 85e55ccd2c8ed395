import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from silodp.core.errors import BadInput
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.losses import cross_entropy, logistic, squared_error
from silodp.core.problem.models import lenet
from silodp.core.problem.problem import Problem
from silodp.engine import convolution, structured
from silodp.engine.clipping import clipped_sum, task
from silodp.engine.model import MeanPool, Residual, SelfAttention, chain, read
from silodp.engine.structured import numbers
from silodp.testing.model import check_model, record_gradients

SILOS, RECORDS, RUNS, TOKENS, D = 3, 5, 2, 11, 8
COUNTS = (5, 3, 1)
SMALL = 1e-10


def plain_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )


def odd_cnn() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), bias=False),
            nn.GELU(),
            nn.AvgPool2d((1, 2)),
        ),
        *(
            nn.Conv2d(4, 6, 3, padding="same", dilation=2, groups=2),
            nn.GroupNorm(3, 6),
            nn.Sigmoid(),
            nn.AdaptiveAvgPool2d(2),
        ),
        *(nn.Conv2d(6, 4, 1), nn.Flatten(), nn.Dropout(0.5).eval(), nn.Linear(16, 3, bias=False)),
    )


def residual_cnn() -> nn.Module:
    body = Residual(
        nn.GroupNorm(2, 4, affine=False), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Identity()
    )
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2), body, nn.LayerNorm((4, 3, 3)), nn.Flatten(), nn.Linear(36, 3)
    )


def frozen_features() -> nn.Module:
    model = plain_cnn()
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    model[6].weight.requires_grad_(False)
    return model


def transformer(outputs: int = 3, padding: int | None = None) -> nn.Module:
    attention = Residual(nn.LayerNorm(D), nn.Linear(D, 3 * D), SelfAttention(2), nn.Linear(D, D))
    feed = Residual(
        nn.LayerNorm(D, bias=False), nn.Linear(D, 2 * D, bias=False), nn.GELU(), nn.Linear(2 * D, D)
    )
    return nn.Sequential(
        nn.Embedding(TOKENS, D, padding_idx=padding),
        attention,
        feed,
        MeanPool(),
        nn.LayerNorm(D),
        nn.Linear(D, outputs),
    )


MODELS = {
    "plain CNN": plain_cnn,
    "CNN with odd settings": odd_cnn,
    "residual CNN": residual_cnn,
    "frozen features": frozen_features,
    "transformer": transformer,
    "padded transformer": lambda: transformer(padding=3),
    "bag of tokens": lambda: nn.Sequential(
        nn.Embedding(TOKENS, D), nn.Flatten(), nn.Linear(6 * D, 3)
    ),
    "Linear on two middle axes": lambda: nn.Sequential(
        nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ),
    "LayerNorm first": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 3)),
}
IMAGES = [name for name in MODELS if "token" not in name and "transformer" not in name]


def data(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SILOS, RECORDS, 2, 8, 8, generator=random, dtype=torch.float64).to(dtype)
    if name not in IMAGES:
        x = torch.randint(
            5, (SILOS, RECORDS, 6), generator=random
        )  # few tokens, so that records repeat them
        assert (x.sort(-1).values.diff(dim=-1) == 0).any(-1).all()
    y = torch.randint(3, (SILOS, RECORDS), generator=random)
    return x, y, (torch.arange(RECORDS) < torch.tensor(COUNTS)[:, None]).to(dtype)


def points(
    problem: Problem, dtype: torch.dtype, *, silos: bool = False, move: float = 0.3
) -> tuple[Tensor, Tensor]:
    w = problem.initial(range(RUNS * SILOS)).to(dtype)
    w = w.view(RUNS, SILOS, -1) if silos else w[:RUNS]
    step = torch.randn(w.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )
    return w, w + move * w.norm(dim=-1, keepdim=True) * step / step.norm(dim=-1, keepdim=True)


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


def gradients(problem: Problem, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(J, S, n, d) by autograd on one record after the other, in float64; w is (J, d) or (J, S,
    d).
    """
    if w.dim() == 2:
        return torch.stack([record_gradients(problem, point, x, y) for point in w])
    return torch.stack(
        [
            torch.cat(
                [
                    record_gradients(problem, p, x[s : s + 1], y[s : s + 1])
                    for s, p in enumerate(run)
                ]
            )
            for run in w
        ]
    )


def loop(found: Tensor, weight: Tensor, clip: Tensor) -> Tensor:
    norm = found.norm(dim=-1)
    factor = torch.where(norm > clip[..., None], clip[..., None] / norm, 1) * weight
    return (found * factor[..., None]).sum(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("silos", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_structured_path_equals_a_loop_over_records(name, silos, dtype):
    problem = Problem(MODELS[name]().to(dtype), cross_entropy)
    x, y, weight = data(name, dtype)
    assert chain(problem, x) == []
    assert numbers(problem, x)
    w, reference = points(problem, dtype, silos=silos)
    by_run = torch.stack([weight, 2.5 * weight.roll(1, 1)])
    for other in (None, reference):
        found = gradients(problem, w, x, y)
        if other is not None:
            found = found - gradients(problem, other, x, y)
        median = float(found.norm(dim=-1).median())
        for clip in (torch.full((RUNS, 1), torch.inf), torch.tensor([[median], [median / 7]])):
            for mask in (weight, by_run):
                fast = clipped_sum(problem, w, x, y, mask, clip, reference=other)
                assert distance(fast, loop(found, mask, clip)) < (
                    1e-5 if dtype == torch.float32 else SMALL
                )


@pytest.mark.parametrize("name", MODELS)
def test_small_moves_lose_no_digits_and_keep_the_clip(name):
    problem = Problem(MODELS[name](), cross_entropy)
    x, y, weight = data(name)
    w, reference = points(problem, torch.float32, move=1e-4)
    found = gradients(problem, w, x, y) - gradients(problem, reference, x, y)
    assert (
        distance(
            clipped_sum(problem, w, x, y, weight, torch.inf, reference=reference),
            loop(found, weight, torch.tensor([[torch.inf]])),
        )
        < 0.01
    )
    single, target = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
    for other in (None, reference):
        free = (
            clipped_sum(
                problem, w, single, target, torch.ones(target.shape), torch.inf, reference=other
            )
            .double()
            .norm(dim=-1)
        )
        for clip in (float(free.median()), float(free.max()) * 0.999, float(free.median()) / 1000):
            norm = (
                clipped_sum(
                    problem, w, single, target, torch.ones(target.shape), clip, reference=other
                )
                .double()
                .norm(dim=-1)
            )
            assert norm.max() <= clip * (1 + CLIP_TOLERANCE)
            assert (norm[free > 1.01 * clip] >= clip * (1 - 1e-3)).all()


@pytest.mark.parametrize("factor", [2.0, 1.1, 1 + 1e-4])
def test_terms_that_cancel_by_rescaling_stay_within_the_clip(factor):
    """With ReLU, (k W1, W2, W3 / k) is the same function; in the middle layer a2 = k a1 and e2 = e1
    / k, and both terms cancel.
    """
    layers = (module for _ in range(3) for module in (nn.Linear(D, D, bias=False), nn.ReLU()))
    problem = Problem(nn.Sequential(Residual(), *layers), squared_error)
    x = torch.randn(SILOS * RECORDS, 1, D, generator=torch.Generator().manual_seed(0)).abs()
    assert numbers(problem, x)
    w = problem.initial(range(4)).abs() * torch.tensor([1e4, 1e-4, 1e4]).repeat_interleave(D * D)
    other = w * torch.tensor([factor, 1.0, 1 / factor]).repeat_interleave(D * D)
    for clip in (1.0, 1e-3, 1e3):
        norm = (
            clipped_sum(
                problem, w, x, torch.zeros_like(x), torch.ones(len(x), 1), clip, reference=other
            )
            .double()
            .norm(dim=-1)
        )
        assert norm.isfinite().all()
        assert norm.max() <= clip * (1 + CLIP_TOLERANCE)


@pytest.mark.parametrize("name", ["plain CNN", "residual CNN", "transformer"])
def test_the_structured_path_conforms(name):
    x, y, _ = data(name)
    check_model(Problem(MODELS[name](), cross_entropy), x[:2, :3], y[:2, :3])


def test_it_conforms_for_other_losses():
    x, y, _ = data("transformer")
    check_model(Problem(transformer(outputs=1), logistic), x[:2, :2], (y[:2, :2] > 0).float())
    check_model(Problem(transformer(), functional.cross_entropy), x[:2, :2], y[:2, :2])


@pytest.mark.parametrize("loss", [cross_entropy, functional.cross_entropy])
@pytest.mark.parametrize("name", ["plain CNN", "CNN with odd settings", "residual CNN"])
def test_a_bad_record_contributes_nothing_and_changes_no_other(name, loss):
    problem = Problem(MODELS[name](), loss)
    x, y, weight = data(name)
    w, reference = points(problem, torch.float32)
    without = weight.clone()
    without[0, 1] = 0
    for other in (None, reference):
        expected = clipped_sum(problem, w, x, y, without, 0.5, reference=other)
        for junk in (torch.nan, torch.inf, -torch.inf, 1e38):
            bad = x.clone()
            bad[0, 1, 0, 2, 2] = junk
            bad[weight == 0] = junk
            assert torch.equal(
                expected, clipped_sum(problem, w, bad, y, without, 0.5, reference=other)
            )
            found = clipped_sum(problem, w, bad, y, weight, 0.5, reference=other)
            assert found.isfinite().all()
            if junk != 1e38 or name == "plain CNN":
                assert distance(found, expected) < 1e-5
            assert ((found - expected).norm(dim=-1) <= 0.5 * (1 + 1e-4)).all()


def test_padding_of_a_sequence_model_may_hold_tokens_and_labels_out_of_range():
    problem = Problem(transformer(), cross_entropy)
    x, y, weight = data("transformer")
    w, reference = points(problem, torch.float32)
    for other in (None, reference):
        clean = clipped_sum(problem, w, x, y, weight, 0.5, reference=other)
        dirty = clipped_sum(
            problem,
            w,
            x.masked_fill(weight[..., None] == 0, 999),
            y.masked_fill(weight == 0, -7),
            weight,
            0.5,
            reference=other,
        )
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("name", ["plain CNN", "transformer"])
def test_a_point_that_is_not_finite_spoils_its_own_run_only(name):
    problem = Problem(MODELS[name](), cross_entropy)
    x, y, weight = data(name)
    w, reference = points(problem, torch.float32)
    broken = w.clone()
    broken[1] = torch.nan
    for other in (None, reference):
        clean, found = (
            clipped_sum(problem, p, x, y, weight, 0.5, reference=other) for p in (w, broken)
        )
        assert not found[1].any()
        assert torch.equal(found[0], clean[0])


@pytest.mark.parametrize("name", ["plain CNN", "transformer"])
def test_no_clip_no_move_and_no_record_give_exactly_zero(name):
    problem = Problem(MODELS[name](), cross_entropy)
    x, y, weight = data(name)
    w, reference = points(problem, torch.float32)
    for clip in (0.0, 1e-30, torch.tensor([[torch.nan], [-1.0]])):
        assert not clipped_sum(problem, w, x, y, weight, clip).any()
        assert not clipped_sum(problem, w, x, y, weight, clip, reference=reference).any()
    assert not clipped_sum(problem, w, x, y, weight, 1.0, reference=w).any()
    assert not clipped_sum(problem, w, x, y, 0 * weight, 1.0).any()
    assert not clipped_sum(problem, w, x[:, :0], y[:, :0], weight[:, :0], 1.0).any()


@pytest.mark.parametrize("silos", [False, True])
@pytest.mark.parametrize("name", ["CNN with odd settings", "transformer"])
def test_chunks_change_nothing(name, silos):
    problem = Problem(MODELS[name](), cross_entropy)
    x, y, weight = data(name)
    w, reference = points(problem, torch.float32, silos=silos)
    for mask in (weight, torch.stack([weight, weight.flip(1)])):
        for other in (None, reference):
            whole = clipped_sum(problem, w, x, y, mask, 0.3, reference=other)
            for records in (0, 2, 7):
                memory = 1 + records * task(problem, w, x, y, mask, 0.3, reference=other).bytes(
                    numbers(problem, x)
                )
                assert (
                    distance(
                        clipped_sum(problem, w, x, y, mask, 0.3, reference=other, memory=memory),
                        whole,
                    )
                    < 1e-5
                )


def test_no_graph_is_kept_and_no_argument_changes():
    for name in ("plain CNN", "transformer"):
        problem = Problem(MODELS[name](), cross_entropy)
        x, y, weight = data(name)
        w, reference = (p.requires_grad_() for p in points(problem, torch.float32))
        before = [t.detach().clone() for t in (w, reference, x, y, weight)]
        with torch.no_grad():
            quiet = clipped_sum(problem, w, x, y, weight, 0.5, reference=reference)
        found = clipped_sum(problem, w, x, y, weight, 0.5, reference=reference)
        assert torch.equal(quiet, found)
        assert not found.requires_grad
        assert all(
            torch.equal(a, b) for a, b in zip(before, (w, reference, x, y, weight), strict=True)
        )


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Mixer(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input - input.mean(0)


def with_conv(conv: nn.Module, features: int = 108) -> nn.Module:
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(features, 3))


def hooked(kind: str) -> nn.Module:
    model = plain_cnn()
    getattr(model[5], kind)(
        lambda module, *args: 2 * args[-1] if kind == "register_forward_hook" else None
    )
    return model


def patched() -> nn.Module:
    model = plain_cnn()
    model[5].forward = torch.sin
    return model


def stray() -> nn.Module:
    model = plain_cnn()
    model.register_parameter("stray", nn.Parameter(torch.ones(2)))
    return model


OTHERS = {
    "subclass": lambda: with_conv(Doubled(2, 3, 3)),
    "forward hook": lambda: hooked("register_forward_hook"),
    "backward hook": lambda: hooked("register_full_backward_hook"),
    "another forward": patched,
    "parametrisation": lambda: with_conv(
        parametrize.register_parametrization(nn.Conv2d(2, 3, 3), "weight", nn.Tanh())
    ),
    "stray parameter": stray,
    "reflected padding": lambda: with_conv(
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), 192
    ),
    "own module": lambda: with_conv(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Softmax(1))),
    "Flatten of some axes": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Flatten(2), nn.Linear(36, 3), nn.Flatten(), nn.Linear(9, 3)
    ),
}


def test_every_other_model_goes_record_by_record():
    x, y, weight = data("plain CNN")
    for name, make in OTHERS.items():
        problem = Problem(make(), cross_entropy)
        assert numbers(problem, x) is None, name
        if name == "backward hook":  # torch.func cannot take it either
            continue
        w, reference = points(problem, torch.float32)
        found = gradients(problem, w, x, y) - gradients(problem, reference, x, y)
        clip = found.norm(dim=-1).median().view(1, 1)
        assert (
            distance(
                clipped_sum(problem, w, x, y, weight, float(clip), reference=reference),
                loop(found, weight, clip),
            )
            < 1e-4
        ), name


@pytest.mark.parametrize(
    "options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_an_embedding_with_other_settings_goes_record_by_record(options):
    problem = Problem(
        nn.Sequential(nn.Embedding(TOKENS, D, **options), MeanPool(), nn.Linear(D, 3)),
        cross_entropy,
    )
    assert numbers(problem, data("transformer")[0]) is None


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten(0)),
            (4, 4),
        ),  # (records, H, W) is one image to it
        (nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 3)), (4,)),
        (nn.Sequential(nn.LayerNorm((1, 4)), nn.Linear(4, 3)), (4,)),
        (nn.Sequential(nn.Linear(4, 9), SelfAttention(3), nn.Linear(3, 3)), (4,)),
        (nn.Sequential(nn.Linear(3, 3)), ()),
    ],
)
def test_a_layer_that_would_take_the_record_axis_for_another_is_not_used(model, shape):
    assert numbers(Problem(model, cross_entropy), torch.zeros(1, 3, *shape)) is None


def test_a_module_that_mixes_records_is_shown_one_at_a_time():
    problem = Problem(
        nn.Sequential(nn.Flatten(), nn.Linear(128, 4), Mixer(), nn.Linear(4, 3)), cross_entropy
    )
    x, y, weight = data("plain CNN")
    w = points(problem, torch.float32)[0]
    assert numbers(problem, x) is None
    found = clipped_sum(problem, w, x, y, weight, torch.inf)
    assert (
        distance(found, loop(gradients(problem, w, x, y), weight, torch.tensor([[torch.inf]])))
        < 1e-5
    )


def test_lenet_is_the_network_of_the_paper_and_is_structured():
    problem = Problem(lenet(3, 10), cross_entropy)
    x = torch.randn(1, 2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert problem.dim == 62_006
    assert numbers(problem, x)
    w, y = problem.initial([0]), torch.tensor([[1, 9]])
    found = clipped_sum(problem, w, x, y, torch.ones(1, 2), torch.inf)
    assert (
        distance(
            found, loop(gradients(problem, w, x, y), torch.ones(1, 2), torch.tensor([[torch.inf]]))
        )
        < 1e-5
    )


def test_the_blocks_say_what_they_are_and_refuse_what_they_cannot_take():
    assert repr(SelfAttention(4)) == "SelfAttention(4)"
    assert (
        Problem(transformer(), cross_entropy).definition()
        != Problem(transformer(2), cross_entropy).definition()
    )
    with pytest.raises(BadInput, match="heads is 0"):
        SelfAttention(0)
    with pytest.raises(BadInput, match="multiple of 3 x 2 heads"):
        SelfAttention(2)(torch.zeros(1, 2, 9))


def test_attention_is_that_of_torch():
    x = torch.randn(3, 6, 3 * D, generator=torch.Generator().manual_seed(0))
    torch_own = nn.MultiheadAttention(D, 2, bias=False, batch_first=True)
    with torch.no_grad():
        torch_own.in_proj_weight.copy_(torch.eye(D).repeat(3, 1))
        torch_own.out_proj.weight.copy_(torch.eye(D))
        assert torch.allclose(SelfAttention(2)(x), torch_own(*x.chunk(3, -1))[0], atol=1e-6)


# --- what must not take the fast path ------------------------------------------------------------


def shrinks():
    """Alone (1, 1, H) + (1, H) is the record's own; in a batch (B, 1, H) + (B, H) would be (B, B,
    H), every record with every other.
    """
    return nn.Sequential(
        Residual(nn.Flatten(), nn.Linear(4, 4)), MeanPool(), nn.Linear(4, 2)
    ), torch.randn(1, 9, 1, 4)


def pooled():
    return nn.Sequential(
        Residual(MeanPool(), nn.Linear(4, 4)), MeanPool(), nn.Linear(4, 2)
    ), torch.randn(1, 9, 1, 4)


def gated():
    act = nn.Tanh()
    act.forward = lambda z: torch.tanh(z) * torch.tanh(z.mean())  # type: ignore[method-assign]
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 2)), torch.randn(1, 9, 4)


def gated_after_norm():
    model, _ = gated()
    return nn.Sequential(nn.LayerNorm(4), *model), torch.randn(1, 9, 4)


def buffered():
    layer = nn.Linear(4, 2)
    del layer.bias
    layer.register_buffer("bias", torch.ones(2))
    return nn.Sequential(nn.LayerNorm(4), layer), torch.randn(1, 9, 4)


def norm_twice():
    norm = nn.LayerNorm(4, elementwise_affine=False)
    return nn.Sequential(
        Residual(norm, nn.Linear(4, 4)), Residual(norm, nn.Linear(4, 4)), nn.Linear(4, 2)
    ), torch.randn(1, 9, 4)


@pytest.mark.parametrize("case", [shrinks, pooled, gated, gated_after_norm, buffered, norm_twice])
def test_whatever_could_mix_records_in_a_batch_is_taken_record_by_record(case):
    model, x = case()
    problem = Problem(model, cross_entropy)
    w, y = problem.initial([0]), torch.arange(9)[None] % 2
    together = clipped_sum(problem, w, x, y, torch.ones(1, 9), 0.5)
    alone = sum(
        clipped_sum(problem, w, x[:, i : i + 1], y[:, i : i + 1], torch.ones(1, 1), 0.5)
        for i in range(9)
    )
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_a_hook_on_all_modules_sends_every_model_to_the_fallback():
    def mixes(module, args, output):
        return output * torch.tanh(output.mean()) if isinstance(module, nn.Tanh) else None

    handle = nn.modules.module.register_module_forward_hook(mixes)
    try:
        for model in (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
            nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)),
        ):
            problem, x, y = (
                Problem(model, cross_entropy),
                torch.randn(1, 9, 4),
                torch.arange(9)[None] % 2,
            )
            together = clipped_sum(problem, problem.initial([0]), x, y, torch.ones(1, 9), 0.5)
            each = [
                clipped_sum(
                    problem,
                    problem.initial([0]),
                    x[:, i : i + 1],
                    y[:, i : i + 1],
                    torch.ones(1, 1),
                    0.5,
                )
                for i in range(9)
            ]
            torch.testing.assert_close(together, torch.stack(each).sum(0), rtol=1e-5, atol=1e-6)
    finally:
        handle.remove()


def test_a_token_out_of_range_in_a_record_of_weight_0_changes_nothing():
    class Own(nn.Embedding):
        """Not the type with a rule: each record alone."""

    for kind in (nn.Embedding, Own):
        problem = Problem(nn.Sequential(kind(5, 4), MeanPool(), nn.Linear(4, 2)), cross_entropy)
        x, y, weight = (
            torch.randint(0, 5, (1, 6, 3)),
            torch.zeros(1, 6, dtype=torch.int64),
            torch.ones(1, 6),
        )
        weight[0, 2] = 0
        clean = clipped_sum(problem, problem.initial([0]), x, y, weight, 1.0)
        x[0, 2] = -7
        torch.testing.assert_close(
            clipped_sum(problem, problem.initial([0]), x, y, weight, 1.0), clean
        )


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3),
        nn.Conv2d(2, 4, (3, 2), stride=(2, 3)),
        nn.Conv2d(2, 4, 2, dilation=3, groups=2),
    ],
)
def test_the_convolution_and_its_transpose_are_those_of_torch(layer):
    a = torch.randn(3, 2, 8, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.allclose(
        convolution.convolution(layer, a, layer.weight, layer.bias), layer(a), atol=1e-6
    )
    e = torch.randn(layer(a).shape, generator=torch.Generator().manual_seed(1))
    found = convolution.transposed(layer, e, layer.weight, a.shape[2:])
    assert torch.allclose(found, torch.autograd.grad(layer(a), a, e)[0], atol=1e-6)


def test_a_relu_waits_for_the_pool_behind_it_and_ties_go_where_torch_sends_them():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    problem = Problem(model, cross_entropy)
    x, y, weight = data("plain CNN")
    x = (
        x > 0.5
        # with weights of -1, 0 and 1 most windows hold their maximum several times, and many none
        # above 0
    ).float()
    root = read(problem)
    assert [type(node.module) for node in root.children[1:3]] == [nn.MaxPool2d, nn.ReLU]
    w = (4 * problem.initial(range(RUNS))).round()
    z = functional.conv2d(x.flatten(0, 1), *list(problem.split(w[0]).values())[:2])
    windows = z.unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    assert ((windows == windows.amax(-1, keepdim=True)).sum(-1) > 1).float().mean() > 0.2
    assert (windows.amax(-1) <= 0).any()
    found = clipped_sum(problem, w, x, y, weight, torch.inf)
    assert (
        distance(found, loop(gradients(problem, w, x, y), weight, torch.tensor([[torch.inf]])))
        < 1e-5
    )
    padded = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(64, 3)
    )
    root = read(Problem(padded, cross_entropy))
    assert [type(node.module) for node in root.children[1:3]] == [nn.ReLU, nn.MaxPool2d]


def test_nothing_of_a_finished_sum_is_kept():
    problem = Problem(lenet(3, 10), cross_entropy)
    x, y = torch.zeros(2, 3, 3, 32, 32), torch.zeros(2, 3, dtype=torch.int64)
    clipped_sum(problem, problem.initial([0]), x, y, torch.tensor([[1.0, 1.0, 0.0]] * 2), 1.0)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is structured._Work], (
        "each held a copy of all records"
    )
