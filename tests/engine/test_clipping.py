import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from silodp.core.errors import BadInput
from silodp.core.numbers import CLIP_TOLERANCE
from silodp.core.problem.losses import cross_entropy, logistic, squared_error
from silodp.core.problem.problem import Problem
from silodp.engine import ghost
from silodp.engine.clipping import IN_TORCH, clipped_sum
from silodp.engine.model import chain
from silodp.testing.model import check_model, record_gradients

SILOS, RECORDS, FEATURES, RUNS = 3, 7, 6, 4
COUNTS = (7, 4, 1)


class Square(nn.Module):
    """A user's own module: neither a layer with a rule nor a known activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(FEATURES))
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.gain * x) ** 2)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 3))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def with_frozen_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model


def with_tied_activation() -> nn.Module:
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(FEATURES, 5), tanh, nn.Linear(5, 4), tanh, nn.Linear(4, 3))


CHAINS = {
    "one activation twice": with_tied_activation,
    "activations first, last and in a row": lambda: nn.Sequential(
        nn.ReLU(),
        nn.Linear(FEATURES, 5),
        nn.ReLU(),
        nn.Tanh(),
        nn.Identity(),
        nn.ReLU(),
        nn.Linear(5, 3),
        nn.ReLU(),
    ),
    "no hidden layer": lambda: nn.Linear(FEATURES, 3),
    "one": lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 3)),
    "two, no bias": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False),
        nn.Tanh(),
        nn.Linear(5, 4, bias=False),
        nn.GELU(),
        nn.Linear(4, 3),
    ),
    "nested, in place": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(FEATURES, 5), nn.LeakyReLU(inplace=True)),
        nn.Linear(5, 3),
    ),
    "wide": lambda: nn.Sequential(
        nn.Linear(FEATURES, 150),
        nn.SiLU(),
        nn.Dropout(0.5).eval(),
        nn.Linear(150, 3),
        nn.Softplus(),
    ),
}
OTHERS = {
    "custom module": Square,
    "subclass of Linear": lambda: Doubled(FEATURES, 3),
    "hook": with_hook,
    "frozen layer": with_frozen_layer,
    "LayerNorm": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)
    ),
    "BatchNorm in eval mode": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
    ).eval(),
    "Conv1d": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)
    ),
}


def data(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(SILOS, RECORDS, FEATURES, generator=random, dtype=torch.float64).to(dtype)
    y = torch.randint(3, (SILOS, RECORDS), generator=random)
    weight = (torch.arange(RECORDS) < torch.tensor(COUNTS)[:, None]).to(dtype)
    return x, y, weight


def points(
    problem: Problem, dtype: torch.dtype, *, silos: bool, move: float = 0.3
) -> tuple[Tensor, Tensor]:
    w = problem.initial(range(RUNS * SILOS)).to(dtype)
    w = w.view(RUNS, SILOS, -1) if silos else w[:RUNS]
    step = torch.randn(w.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )
    return w, w + move * w.norm(dim=-1, keepdim=True) * step / step.norm(dim=-1, keepdim=True)


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


def alone(
    problem: Problem, w: Tensor, x: Tensor, y: Tensor, clip: float, reference: Tensor | None = None
) -> Tensor:
    """Norms (J, records) of what each record contributes as a silo of its own."""
    x, y = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
    return (
        clipped_sum(problem, w, x, y, torch.ones(y.shape[:2]), clip, reference=reference)
        .double()
        .norm(dim=-1)
    )


@pytest.fixture
def fallback():
    return functools.partial(clipped_sum, engines=[IN_TORCH[-1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("silos", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_the_ghost_path_equals_the_fallback(name, silos, dtype, fallback):
    problem = Problem(CHAINS[name]().to(dtype), cross_entropy)
    x, y, weight = data(dtype)
    w, reference = points(problem, dtype, silos=silos)
    assert chain(problem, x)
    for other in (None, reference):
        for clip in (torch.inf, 0.5, torch.tensor([[0.0], [0.1], [1.0], [torch.inf]])):
            fast = clipped_sum(problem, w, x, y, weight, clip, reference=other)
            assert distance(fast, fallback(problem, w, x, y, weight, clip, reference=other)) < (
                1e-5 if dtype == torch.float32 else 1e-10
            )


@pytest.mark.parametrize("name", ["one", "two, no bias"])
def test_the_engine_conforms_on_chains(name):
    x, y, _ = data()
    check_model(Problem(CHAINS[name](), cross_entropy), x[:2, :4], y[:2, :4])


@pytest.mark.parametrize(
    ("loss", "outputs", "target"),
    [
        (logistic, 1, torch.tensor([[0.0, 1.0], [1.0, 1.0]])),
        (squared_error, 2, torch.ones(2, 2, 2)),
        (functional.cross_entropy, 3, torch.tensor([[0, 2], [1, 1]])),
    ],
)
def test_the_engine_conforms_for_every_kind_of_loss(loss, outputs, target):
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Sigmoid(), nn.Linear(4, outputs))
    x = data()[0][:2, :2]
    x = x.clamp(-2, 2)
    check_model(Problem(model, loss), x, target)


@pytest.mark.parametrize("name", ["custom module", "Conv1d"])
def test_the_engine_conforms_on_other_models(name):
    x, y, _ = data()
    check_model(Problem(OTHERS[name](), cross_entropy), x[:2, :3], y[:2, :3])


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_model_equals_a_loop_over_records(name):
    problem = Problem(OTHERS[name](), cross_entropy)
    x, y, weight = data()
    w, reference = (p[:1] for p in points(problem, torch.float32, silos=False))
    assert chain(problem, x) == []
    gradients = record_gradients(problem, w[0], x, y) - record_gradients(
        problem, reference[0], x, y
    )
    norm = gradients.norm(dim=-1)
    clip = float(norm.median())
    expected = (gradients * (weight * (clip / norm).clamp(max=1))[..., None]).sum(1)
    assert (
        distance(clipped_sum(problem, w, x, y, weight, clip, reference=reference)[0], expected)
        < 1e-5
    )


def test_a_conv2d_net_equals_a_loop_over_records():
    problem = Problem(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), cross_entropy
    )
    x, y = (
        torch.randn(2, 3, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[0, 1, 2], [2, 1, 0]]),
    )
    w = problem.initial([0, 1])
    fast = clipped_sum(problem, w, x, y, torch.ones(2, 3), torch.inf)
    assert distance(fast[1], record_gradients(problem, w[1], x, y).sum(1)) < 1e-5


@pytest.mark.parametrize("move", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_a_clipped_difference_stays_within_the_clip_however_small_the_move(move):
    problem = Problem(CHAINS["two, no bias"](), cross_entropy)
    x, y, _ = data()
    w, reference = points(problem, torch.float32, silos=False, move=move)
    free = alone(problem, w, x, y, torch.inf, reference)
    for clip in (float(free.median()), float(free.median()) / 100):
        norm = alone(problem, w, x, y, clip, reference)
        assert norm.max() <= clip * (1 + CLIP_TOLERANCE)
        assert norm[free > 2 * clip].min() >= clip * (1 - 0.01)


SQUARES = ghost.squares


def naive_squares(
    names: dict[str, str], terms: list[ghost.Term]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """||a1||^2 ||e1||^2 + ||a2||^2 ||e2||^2 - 2 (a1.a2)(e1.e2) in float32, which cancels: the
    planted bug.
    """
    true = SQUARES(names, terms)
    if len(terms) == 1:
        return true
    (a1, de), (da, e2) = terms
    a2, e1 = a1 - da, de + e2
    square = (
        (a1**2).sum(-2) * (e1**2).sum(-2)
        + (a2**2).sum(-2) * (e2**2).sum(-2)
        - 2 * (a1 * a2).sum(-2) * (e1 * e2).sum(-2)
    )
    if "bias" in names:
        square += (de**2).sum(-2)
    return square.double().clamp(min=0), true[1], true[2]


def test_the_cancelling_formula_for_a_difference_is_caught(monkeypatch):
    x, y, _ = data()
    problem = Problem(
        nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3)), cross_entropy
    )
    monkeypatch.setattr(ghost, "squares", naive_squares)
    with pytest.raises(AssertionError, match=r"GradDiff, relative move .* contributes norm"):
        check_model(problem, x[:2, :4], y[:2, :4])


def test_clipping_each_tensor_by_itself_is_caught():
    def per_tensor(problem, w, x, y, weight, clip, *, reference=None):
        whole = clipped_sum(problem, w, x, y, weight, torch.inf, reference=reference)
        parts = [p.flatten(2) for p in problem.split(whole).values()]
        limit = torch.as_tensor(clip)[..., None] if isinstance(clip, Tensor) else clip
        return torch.cat(
            [p * (limit / p.norm(dim=-1, keepdim=True)).clamp(max=1) for p in parts], -1
        )

    x, y, _ = data()
    with pytest.raises(AssertionError):
        check_model(
            Problem(CHAINS["one"](), cross_entropy), x[:2, :1], y[:2, :1], engine=per_tensor
        )


@pytest.mark.parametrize("factor", [2.0, 1.1, 1 + 1e-4])
def test_terms_that_cancel_by_rescaling_stay_within_the_clip(factor):
    """With ReLU, (k W1, W2, W3 / k) is the same function; in the middle layer a2 = k a1 and e2 = e1
    / k, and both terms cancel.
    """
    problem = Problem(
        nn.Sequential(
            *(m for k in range(3) for m in (nn.Linear(FEATURES, FEATURES, bias=False), nn.ReLU()))
        ),
        squared_error,
    )
    x = data()[0]
    y = torch.zeros_like(x)
    size = FEATURES**2
    scales = torch.cat([torch.full((size,), s) for s in (1e4, 1e-4, 1e4)])
    rescaled = torch.cat([torch.full((size,), s) for s in (factor, 1.0, 1 / factor)])
    w = problem.initial(range(RUNS)).abs() * scales
    for one, other in ((w, w * rescaled), (w * rescaled, w)):
        for clip in (1.0, 1e-3, 1e3):
            norm = alone(problem, one, x.abs(), y, clip, other)
            assert norm.isfinite().all()
            assert norm.max() <= clip * (1 + CLIP_TOLERANCE)


@pytest.mark.parametrize(
    ("silos", "loss"),
    [(False, cross_entropy), (True, cross_entropy), (False, functional.cross_entropy)],
)
def test_padding_may_hold_anything(silos, loss, fallback):
    problem = Problem(CHAINS["one"](), loss)
    x, y, weight = data()
    w, reference = points(problem, torch.float32, silos=silos)
    by_run = torch.stack([weight, weight.roll(1, 1) * weight, 0 * weight, weight])
    for run, mask in ((clipped_sum, weight), (clipped_sum, by_run), (fallback, weight)):
        unused = ~(mask if mask.dim() == 2 else mask.any(0)).bool()
        for other in (None, reference):
            clean = run(problem, w, x, y, mask, 0.5, reference=other)
            for junk in (torch.nan, torch.inf, 1e38):
                dirty = run(
                    problem,
                    w,
                    x.masked_fill(unused[..., None], junk),
                    y.masked_fill(unused, 99),
                    mask,
                    0.5,
                    reference=other,
                )
                assert torch.equal(clean, dirty)


def test_a_record_that_is_bad_in_one_run_only_is_left_out_of_that_run_only():
    problem = Problem(CHAINS["one"](), cross_entropy)
    x, y, weight = data()
    w, reference = points(problem, torch.float32, silos=False)
    broken = w.clone()
    broken[1] = torch.nan
    for other in (None, reference):
        clean, found = (
            clipped_sum(problem, p, x, y, weight, 0.5, reference=other) for p in (w, broken)
        )
        assert not found[1].any()
        assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("silos", [False, True])
@pytest.mark.parametrize("path", ["ghost", "fallback"])
def test_a_bad_record_changes_no_bit_of_other_runs_and_silos_whatever_the_shapes(
    path, silos, fallback
):
    run, random = clipped_sum if path == "ghost" else fallback, torch.Generator().manual_seed(2)
    for features, hidden, records in ((3, 2, 5), (37, 19, 23), (64, 16, 48)):
        model = nn.Sequential(
            nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 3), nn.Identity()
        )
        problem = Problem(model, cross_entropy)
        x, y = (
            torch.randn(SILOS, records, features, generator=random),
            torch.randint(3, (SILOS, records), generator=random),
        )
        w, reference = points(problem, torch.float32, silos=silos)
        broken = w.clone()
        broken[1] = torch.nan
        weight = torch.ones(SILOS, records)
        for other in (None, reference):
            clean = run(problem, w, x, y, weight, 0.5, reference=other)
            assert torch.equal(
                run(problem, broken, x, y, weight, 0.5, reference=other)[[0, 2, 3]],
                clean[[0, 2, 3]],
            )
            left = []
            for junk in (torch.nan, torch.inf, -torch.inf):
                bad = x.clone()
                bad[0, 1] = junk
                left.append(run(problem, w, bad, y, weight, 0.5, reference=other))
                assert torch.equal(left[-1][:, 1:], clean[:, 1:])
                assert torch.equal(left[-1], left[0])


@pytest.mark.parametrize("path", ["ghost", "fallback"])
def test_a_label_out_of_range_contributes_zero(path, fallback):
    problem = Problem(CHAINS["one"](), cross_entropy)
    x, y, weight = data()
    w, reference = points(problem, torch.float32, silos=False)
    run = clipped_sum if path == "ghost" else fallback
    without = weight.clone()
    without[0, 2] = 0
    for label in (-1, 3, 10**9):
        bad = y.clone()
        bad[0, 2] = label
        for other in (None, reference):
            assert torch.allclose(
                run(problem, w, x, bad, weight, 0.5, reference=other),
                run(problem, w, x, y, without, 0.5, reference=other),
            )


def test_norms_hold_over_the_whole_range_of_float32():
    problem = Problem(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), squared_error)
    sizes = 10.0 ** torch.arange(-44.0, 39.0, 3)
    x = (sizes[:, None] * torch.tensor([1.0, 0.7]))[:, None]
    for scale in (1e-30, 1e-15, 1.0, 1e15):
        w = problem.initial(range(8)) * scale
        for target in (1e-40, 1e-20, 1.0, 1e20):
            for clip in (1e-15, 1e-3, 1.0, 1e15):
                norm = alone(problem, w, x, torch.full((len(x), 1), target), clip, None)
                assert norm.isfinite().all()
                assert norm.max() <= clip * (1 + CLIP_TOLERANCE)


def test_a_scale_too_small_for_float32_is_not_rounded_up():
    problem = Problem(nn.Linear(1, 1, bias=False), squared_error)
    for size in torch.linspace(2e14, 6e14, 20):
        norm = alone(problem, torch.ones(1, 1), size.view(1, 1, 1), torch.zeros(1, 1), 1e-14)
        assert norm.max() <= 1e-14 * (1 + CLIP_TOLERANCE)


def test_a_gradient_too_small_for_float32_is_not_rounded_up_times_a_huge_input():
    problem = Problem(
        nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), squared_error
    )
    steps = (
        torch.arange(1.0, 20.0) * 2.0**-149
    )  # e2 is a few of the smallest numbers of float32, Da is 2e30
    w, reference = torch.tensor([[1e30, 0.0]]), torch.tensor([[-1e30, 0.0]])
    for step in steps:
        free = 2e30 * 2 * float(step)
        for share in (0.3, 0.5, 0.7):
            norm = alone(problem, w, torch.ones(1, 1, 1), step.view(1, 1), share * free, reference)
            assert norm.max() <= share * free * (1 + CLIP_TOLERANCE)


def test_a_clip_of_zero_or_nearly_gives_exactly_zero(fallback):
    problem = Problem(CHAINS["one"](), cross_entropy)
    x, y, weight = data()
    w, reference = points(problem, torch.float32, silos=False)
    for run in (clipped_sum, fallback):
        for clip in (0.0, 1e-30, torch.tensor([[0.0], [torch.nan], [-1.0], [1e-44]])):
            assert not run(problem, w, x, y, weight, clip).any()
            assert not run(problem, w, x, y, weight, clip, reference=reference).any()
        assert not run(problem, w, x, y, weight, 1.0, reference=w).any()


@pytest.mark.parametrize(("silos", "memory"), [(False, 1), (True, 5_000), (False, 20_000)])
def test_chunks_change_nothing(silos, memory, fallback):
    problem = Problem(CHAINS["two, no bias"](), cross_entropy)
    x, y, weight = data()
    w, reference = (p[:2] for p in points(problem, torch.float32, silos=silos))
    arguments = problem, w, x, y, weight.expand(2, -1, -1), torch.tensor([[0.1], [0.5]])
    for run in (clipped_sum, fallback):
        for other in (None, reference):
            assert (
                distance(
                    run(*arguments, reference=other, memory=memory),
                    run(*arguments, reference=other),
                )
                < 1e-5
            )


@pytest.mark.parametrize(
    "name", ["one", "activations first, last and in a row", "nested, in place"]
)
def test_no_graph_is_kept_and_no_argument_changes(name):
    problem = Problem(CHAINS[name](), cross_entropy)
    x, y, weight = data()
    w, reference = (p.requires_grad_() for p in points(problem, torch.float32, silos=False))
    before = [t.detach().clone() for t in (w, reference, x, y, weight)]
    with torch.no_grad():
        quiet = clipped_sum(problem, w, x, y, weight, 0.5, reference=reference)
    found = clipped_sum(problem, w, x, y, weight, 0.5, reference=reference)
    assert torch.equal(quiet, found)
    assert not found.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, (w, reference, x, y, weight), strict=True))


def test_bad_shapes_and_reduced_precision_are_refused():
    problem = Problem(CHAINS["one"](), cross_entropy)
    x, y, weight = data()
    w, reference = points(problem, torch.float32, silos=False)
    for sentence, arguments, options in [
        ("w has shape", (w[0], x, y, weight, 1.0), {}),
        ("w has 52 coordinates; use 53", (w[:, 1:], x, y, weight, 1.0), {}),
        ("reference has shape", (w, x, y, weight, 1.0), {"reference": reference[:1]}),
        ("y and weight have shapes", (w, x, y, weight[:, :2], 1.0), {}),
        ("clip has shape", (w, x, y, weight, torch.ones(3, 1)), {}),
        ("clip is -1", (w, x, y, weight, -1.0), {}),
        ("clip is nan", (w, x, y, weight, torch.nan), {}),
    ]:
        with pytest.raises(BadInput, match=sentence):
            clipped_sum(problem, *arguments, **options)
    with torch.autocast("cpu"), pytest.raises(BadInput, match="reduced precision"):
        clipped_sum(problem, w, x, y, weight, 1.0)
