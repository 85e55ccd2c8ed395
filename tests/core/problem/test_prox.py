"""Every proximal operator against its conformance suite, cvxpy and the edge cases of sweeps."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import cvxpy as cp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from silodp.core.errors import BadInput
from silodp.core.problem.prox import (
    L1,
    Box,
    ElasticNet,
    GroupL1,
    L1Box,
    L2Ball,
    NonNegative,
    NuclearNorm,
    Part,
    Prox,
    Simplex,
    SquaredL2,
    Zero,
    by_name,
    gradient_mapping,
)
from silodp.testing.prox import check_prox

DIM = 6


def interval(y, low, high):
    return [y >= low, y <= high]


# name: (operator, the same f1 for cvxpy as (expression, constraints), minimiser of f1 nearest to a
# vector of ones: what a huge step gives)
OPERATORS = {
    "zero": (Zero(), lambda y: (0, []), [1] * 6),
    "l1": (L1(0.7), lambda y: (0.7 * cp.norm1(y), []), [0] * 6),
    "l1 off": (L1(0.0), lambda y: (0, []), [1] * 6),
    "squared l2": (SquaredL2(0.7), lambda y: (0.35 * cp.sum_squares(y), []), [0] * 6),
    "elastic net": (
        ElasticNet(0.4, 0.3),
        lambda y: (0.4 * cp.norm1(y) + 0.15 * cp.sum_squares(y), []),
        [0] * 6,
    ),
    "group l1": (
        GroupL1(0.5, ((0, 2), (3, 6))),
        lambda y: (0.5 * (cp.norm2(y[0:2]) + cp.norm2(y[3:6])), []),
        [0, 0, 1, 0, 0, 0],
    ),
    "l2 ball": (L2Ball(1.5), lambda y: (0, [cp.norm2(y) <= 1.5]), [1.5 / math.sqrt(6)] * 6),
    "box": (Box(-0.5, 0.8), lambda y: (0, interval(y, -0.5, 0.8)), [0.8] * 6),
    "box, one side": (Box(-math.inf, 0.3), lambda y: (0, [y <= 0.3]), [0.3] * 6),
    "non-negative": (NonNegative(), lambda y: (0, [y >= 0]), [1] * 6),
    "simplex": (Simplex(), lambda y: (0, [y >= 0, cp.sum(y) == 1]), [1 / 6] * 6),
    "simplex, total 2.5": (Simplex(2.5), lambda y: (0, [y >= 0, cp.sum(y) == 2.5]), [2.5 / 6] * 6),
    "nuclear norm, wide": (
        NuclearNorm(0.6, (2, 3)),
        lambda y: (0.6 * cp.normNuc(cp.reshape(y, (2, 3), order="C")), []),
        [0] * 6,
    ),
    "nuclear norm, tall": (
        NuclearNorm(0.6, (3, 2)),
        lambda y: (0.6 * cp.normNuc(cp.reshape(y, (3, 2), order="C")), []),
        [0] * 6,
    ),
    "l1 box around 0": (
        L1Box(0.3, -0.5, 0.8),
        lambda y: (0.3 * cp.norm1(y), interval(y, -0.5, 0.8)),
        [0] * 6,
    ),
    "l1 box above 0": (
        L1Box(0.3, 0.2, 2.0),
        lambda y: (0.3 * cp.norm1(y), interval(y, 0.2, 2.0)),
        [0.2] * 6,
    ),
    "l1 box below 0": (
        L1Box(0.3, -2.0, -0.2),
        lambda y: (0.3 * cp.norm1(y), interval(y, -2.0, -0.2)),
        [-0.2] * 6,
    ),
    "part, l1": (Part(L1(0.7), 1, 4), lambda y: (0.7 * cp.norm1(y[1:4]), []), [1, 0, 0, 0, 1, 1]),
    "part, simplex": (
        Part(Simplex(), 0, 4),
        lambda y: (0, [y[:4] >= 0, cp.sum(y[:4]) == 1]),
        [0.25] * 4 + [1] * 2,
    ),
    "part, nuclear norm": (
        Part(NuclearNorm(0.6, (2, 2)), 2, 6),
        lambda y: (0.6 * cp.normNuc(cp.reshape(y[2:6], (2, 2), order="C")), []),
        [1, 1, 0, 0, 0, 0],
    ),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@every_dtype
@every_operator
def test_each_operator_conforms_and_agrees_with_cvxpy(name, dtype):
    prox, reference, _ = OPERATORS[name]
    check_prox(prox, DIM, dtype=dtype, reference=reference)
    for seed in (1, 2):
        check_prox(prox, DIM, dtype=dtype, seed=seed)


@pytest.mark.parametrize("prox", [Simplex(), L2Ball(3.0), Box(-0.1, 0.1), NonNegative()], ids=repr)
@every_dtype
def test_a_projected_point_of_many_entries_counts_as_inside_and_one_farther_out_does_not(
    prox, dtype
):
    w = 100 * torch.randn(4, 100_000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert prox.value(prox(w, 1.0)).tolist() == [0.0] * 4
    assert prox.value(prox(w, 1.0) * 1.01 - 0.01).tolist() == [math.inf] * 4


@pytest.mark.parametrize("bound", [-0.7, 0.7])
def test_an_average_of_points_on_a_bound_counts_as_inside(bound):
    average = torch.full((1,), bound * (1 + 1e-6))
    assert Box(-0.7, 0.7).value(average).item() == 0


@every_dtype
@every_operator
def test_a_huge_step_gives_the_nearest_minimiser_of_f1(name, dtype):
    prox, _, minimiser = OPERATORS[name]
    for step in (1e9, torch.tensor([[1e9]] * 3), 1e300):
        torch.testing.assert_close(
            prox(torch.ones(3, DIM, dtype=dtype), step), torch.tensor([minimiser] * 3, dtype=dtype)
        )


@every_operator
def test_a_step_in_another_dtype_leaves_the_dtype_of_the_vector(name):
    prox, *_ = OPERATORS[name]
    w, step = torch.ones(3, DIM), torch.full((3, 1), 0.1, dtype=torch.float64)
    assert prox(w, step).dtype == gradient_mapping(w, w, prox, step).dtype == torch.float32


@every_operator
def test_a_diverged_run_leaves_the_other_runs_alone(name):
    prox, *_ = OPERATORS[name]
    w = torch.randn(3, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    broken = w.clone()
    broken[1] = math.nan
    step = torch.tensor([[0.1], [1.0], [2.0]])
    got, wanted = prox(broken, step), prox(w, step)
    torch.testing.assert_close(got[[0, 2]], wanted[[0, 2]])
    assert got[1].isnan().any()
    torch.testing.assert_close(prox.value(broken)[[0, 2]], prox.value(w)[[0, 2]])
    assert not prox.value(broken)[1].isfinite() or isinstance(prox, Zero)


@pytest.mark.parametrize(
    "prox",
    [L1(0.1), ElasticNet(0.1, 0.1), SquaredL2(1.0), NuclearNorm(1.0, (2, 3)), Part(L1(0.1), 0, 6)],
    ids=repr,
)
def test_a_step_for_each_coordinate_is_refused(prox):
    with pytest.raises(BadInput, match=r"step has shape \(6,\), but must be a number or"):
        prox(torch.ones(DIM), torch.ones(DIM))


# --- what the suite must catch -------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A right f1 with a wrong prox."""

    right: Prox
    wrong: Callable[[Tensor, float | Tensor], Tensor]

    def value(self, w):
        return self.right.value(w)

    def __call__(self, w, step):
        return self.wrong(w, step)


def clamp_in_place(w, step):
    return w.clamp_(-1.0, 1.0)


def mix_two_axes(w, step):
    return w.flip(0) if w.shape[:-1] == (2, 3) else w


def turn_round(w, step):
    norm = w.norm(dim=-1, keepdim=True)
    return torch.where((norm > 10) & (norm < 20), -w, w)


def one_if_no_axes(step):
    return 1.0 if isinstance(step, Tensor) and step.ndim == 0 else step


PLANTED = {
    "half the threshold": (Planted(L1(1.0), L1(0.5)), "not the minimiser"),
    "threshold off by a thousandth": (Planted(L1(1.0), L1(1.001)), "not the minimiser|fails by"),
    "step ignored": (Planted(L1(1.0), lambda w, step: L1(1.0)(w, 1.0)), "not the minimiser"),
    "steps averaged over rows": (
        Planted(L1(1.0), lambda w, step: L1(1.0)(w, torch.as_tensor(step).mean())),
        "not the minimiser",
    ),
    "ball too small": (Planted(L2Ball(2.0), L2Ball(1.0)), "not the minimiser"),
    "ball too large": (Planted(L2Ball(1.0), L2Ball(2.0)), "left the domain"),
    "simplex by normalising": (
        Planted(Simplex(), lambda w, step: w.softmax(-1)),
        "not the minimiser",
    ),
    "simplex always in the middle": (
        Planted(Simplex(), lambda w, step: torch.full_like(w, 1 / DIM)),
        "not the minimiser",
    ),
    "elastic net without its l2": (Planted(ElasticNet(0.4, 0.3), L1(0.4)), "not the minimiser"),
    "elastic net shrunk first": (
        Planted(ElasticNet(0.4, 0.3), lambda w, s: L1(0.4)(SquaredL2(0.3)(w, s), s)),
        "not the minimiser",
    ),
    "l1 box clipped first": (
        Planted(L1Box(0.3, -0.5, 0.8), lambda w, s: L1(0.3)(w.clamp(-0.5, 0.8), s)),
        "not the minimiser",
    ),
    "group norm over all": (
        Planted(GroupL1(0.5, ((0, 3), (3, 6))), GroupL1(0.5, ((0, 6),))),
        "not the minimiser",
    ),
    "matrix read by columns": (
        Planted(NuclearNorm(0.6, (2, 3)), NuclearNorm(0.6, (3, 2))),
        "not the minimiser",
    ),
    "argument overwritten": (Planted(Box(-1.0, 1.0), clamp_in_place), "in place"),
    "dtype changed": (Planted(Zero(), lambda w, step: w.float()), "became torch.float32"),
    "batch summed": (Planted(Zero(), lambda w, step: w.sum(0)), "has shape"),
    "rows mixed under two leading axes": (Planted(Zero(), mix_two_axes), "two leading axes differ"),
    "wrong for steps above 10": (
        Planted(L1(1.0), lambda w, s: L1(1.0)(w, torch.as_tensor(s).clamp(max=10))),
        r"for r = 20",
    ),
    "wrong on the boundary": (
        Planted(Box(-0.7, 0.7), lambda w, s: torch.where(w == 0.7, 0, w.clamp(-0.7, 0.7))),
        "not its own projection",
    ),
    "turned round between two spheres": (Planted(Zero(), turn_round), "not firmly non-expansive"),
    "tensor of no axes taken for 1": (
        Planted(L1(1.0), lambda w, s: L1(1.0)(w, one_if_no_axes(s))),
        r"a step of shape \(\) differs",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_suite_catches_a_planted_fault(name):
    prox, message = PLANTED[name]
    with pytest.raises(AssertionError, match=message):
        check_prox(prox, DIM)


@pytest.mark.parametrize("wrong", [0.5, 1.5])
def test_the_suite_catches_half_a_threshold_in_single_precision(wrong):
    with pytest.raises(AssertionError, match="not the minimiser"):
        check_prox(Planted(L1(1.0), L1(wrong)), DIM, dtype=torch.float32)


def test_the_suite_catches_a_value_and_prox_that_agree_with_each_other_but_not_with_the_reference():
    with pytest.raises(AssertionError, match="differs from cvxpy's minimiser"):
        check_prox(L1(0.5), DIM, reference=lambda y: (cp.norm1(y), []))


# --- identities between operators, which hold for all vectors ------------------------------------

vectors = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8).map(
    lambda xs: torch.tensor(xs, dtype=torch.float64)
)
positive = st.floats(1e-3, 1e3)
every_vector = settings(deadline=None, max_examples=40, derandomize=True)


@every_vector
@given(w=vectors, strength=positive, step=positive)
def test_moreau_soft_threshold_and_clip_add_up_to_the_identity(w, strength, step):
    t = strength * step
    torch.testing.assert_close(L1(strength)(w, step) + Box(-t, t)(w, step), w)


@every_vector
@given(w=vectors, strength=positive, step=positive)
def test_moreau_one_group_and_the_l2_ball_add_up_to_the_identity(w, strength, step):
    group = GroupL1(strength, ((0, len(w)),))
    torch.testing.assert_close(group(w, step) + L2Ball(strength * step)(w, step), w)


@every_vector
@given(w=vectors, strength=positive)
def test_the_nuclear_norm_of_a_row_is_its_l2_norm(w, strength):
    row, group = NuclearNorm(strength, (1, len(w))), GroupL1(strength, ((0, len(w)),))
    torch.testing.assert_close(row(w, 0.5), group(w, 0.5), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(row.value(w), group.value(w))


@every_vector
@given(w=vectors, total=positive, shift=st.floats(-1e3, 1e3))
def test_the_simplex_projection_cuts_every_entry_by_one_level_whatever_the_shift(w, total, shift):
    y = Simplex(total)(w, 1.0)
    assert y.min() >= 0
    torch.testing.assert_close(y.sum().item(), total)
    level = (w - y)[y > 0]
    torch.testing.assert_close(level, level[:1].expand_as(level))
    assert (w[y == 0] <= level.max() + 1e-9).all()
    torch.testing.assert_close(Simplex(total)(w + shift, 1.0), y, rtol=1e-7, atol=1e-9)


def test_the_simplex_projection_is_exact_far_from_the_origin_in_single_precision():
    torch.testing.assert_close(Simplex()(torch.full((100,), 1e6), 1.0), torch.full((100,), 0.01))


# --- gradient mapping ----------------------------------------------------------------------------


def test_the_gradient_mapping_without_f1_is_the_gradient():
    w, gradient = torch.randn(
        2, 4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    steps = torch.tensor([[0.1], [1.0], [2.0], [3.0]])
    torch.testing.assert_close(gradient_mapping(w, gradient, Zero(), steps), gradient)


def test_the_gradient_mapping_vanishes_where_minus_the_gradient_is_a_subgradient():
    w = torch.tensor([2.0, 0.0, -1.0])
    assert gradient_mapping(w, torch.tensor([-0.5, 0.3, 0.5]), L1(0.5), 0.25).tolist() == [
        0.0,
        0.0,
        0.0,
    ]
    assert gradient_mapping(w, torch.tensor([-0.5, 0.75, 0.5]), L1(0.5), 0.25).tolist() == [
        0.0,
        0.25,
        0.0,
    ]


# --- the command line ----------------------------------------------------------------------------

SPECIFIED = {
    "zero": Zero(),
    "l1:0.01": L1(0.01),
    "squared-l2:1e-3": SquaredL2(1e-3),
    "elastic-net:0.01:0.1": ElasticNet(0.01, 0.1),
    "group-l1:0.1:0-3:3-10": GroupL1(0.1, ((0, 3), (3, 10))),
    "l2-ball:5": L2Ball(5.0),
    "box:-1:1": Box(-1.0, 1.0),
    "box:0:inf": Box(0.0, math.inf),
    "non-negative": NonNegative(),
    "simplex": Simplex(1.0),
    "simplex:2": Simplex(2.0),
    "nuclear-norm:0.5:2:3": NuclearNorm(0.5, (2, 3)),
    "l1-box:0.1:-1:2": L1Box(0.1, -1.0, 2.0),
    "part:0:4:l1:0.01": Part(L1(0.01), 0, 4),
    "part:0:4:part:1:2:zero": Part(Part(Zero(), 1, 2), 0, 4),
}


@pytest.mark.parametrize("text", SPECIFIED)
def test_a_spec_names_its_operator(text):
    assert by_name(text) == SPECIFIED[text]


BAD_SPECS = [
    "",
    "l3:1",
    "l1",
    "l1:1:2",
    "l1:much",
    "L1:1",
    "zero:1",
    "group-l1:1:3",
    "nuclear-norm:1:2.5:3",
    "part:0:4",
    "part:a:4:l1",
]
BAD_SPECS += ["own.py", "part:0:4:own.py"]  # files without a name


@pytest.mark.parametrize("text", BAD_SPECS)
def test_a_bad_spec_is_answered_with_those_that_exist(text):
    with pytest.raises(
        BadInput,
        match=r"^the prox is '.*', but must be one of zero, l1:STRENGTH, .*part:START:STOP:SPEC$",
    ):
        by_name(text, lambda text: pytest.fail(f"{text} names no file's prox"))


@given(text=st.text(alphabet="zerol12boxpartsimplex:-.0enif", max_size=24))
@every_vector
def test_any_text_gives_an_operator_or_bad_input(text):
    with suppress(BadInput):
        by_name(text)


# --- bad input -----------------------------------------------------------------------------------

REFUSED = {
    "the strength of L1 is -1.0, but must be a finite number, at least 0": lambda: by_name("l1:-1"),
    "the strength of L1 is inf, but must be a finite number, at least 0": lambda: L1(math.inf),
    "the strength of L1 is '1', but must be a finite number, at least 0": lambda: L1("1"),  # pyright: ignore[reportArgumentType]
    "the strength of SquaredL2 is nan, but must be a finite number, at least 0": lambda: by_name(
        "squared-l2:nan"
    ),
    "the l2 of ElasticNet is -2, but must be a finite number, at least 0": lambda: ElasticNet(
        1, -2
    ),
    "the groups of GroupL1 is (), but must be a tuple of disjoint (start, stop) pairs": lambda: (
        GroupL1(1.0, ())
    ),
    "the groups of GroupL1 is ((0, 3), (2, 4)), but must be a tuple of disjoint": lambda: GroupL1(
        1.0, ((0, 3), (2, 4))
    ),
    "the groups of GroupL1 is ((2, 2),), but must be a tuple of disjoint": lambda: GroupL1(
        1.0, ((2, 2),)
    ),
    "the groups of GroupL1 is [[0, 1]], but must be a tuple of disjoint": lambda: GroupL1(
        1.0, [[0, 1]]
    ),  # pyright: ignore[reportArgumentType]
    "the groups of GroupL1 is ((0, 7),), but must be within the 6 parameters": lambda: GroupL1(
        1.0, ((0, 7),)
    )(torch.ones(6), 1.0),
    "the radius of L2Ball is 0.0, but must be a finite number above 0": lambda: by_name(
        "l2-ball:0"
    ),
    "the low of Box is nan, but must be a number below infinity": lambda: Box(math.nan, 1.0),
    "the high of Box is -1.0, but must be a number, at least low, 1.0": lambda: by_name("box:1:-1"),
    "the high of Box is -inf, but must be a number": lambda: Box(-math.inf, -math.inf),
    "the total of Simplex is -1, but must be a finite number above 0": lambda: Simplex(-1),
    (
        "the shape of NuclearNorm is (0, 3), but must be a pair (rows, cols) of positive integers"
    ): lambda: NuclearNorm(1.0, (0, 3)),
    "the shape of NuclearNorm is (2, 3), but must be (rows, cols) with rows": lambda: NuclearNorm(
        1.0, (2, 3)
    ).value(torch.ones(5)),
    "the low of L1Box is inf, but must be a number below infinity": lambda: L1Box(
        1.0, math.inf, math.inf
    ),
    "the start of Part is -1, but must be an integer, at least 0": lambda: Part(Zero(), -1, 3),
    "the stop of Part is 2, but must be an integer above start, 2": lambda: Part(Zero(), 2, 2),
    "the stop of Part is 9, but must be at most 6, the number of parameters": lambda: Part(
        Zero(), 0, 9
    )(torch.ones(6), 1.0),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_bad_argument_is_refused_in_one_sentence(sentence):
    with pytest.raises(BadInput) as refusal:
        REFUSED[sentence]()
    assert str(refusal.value).startswith(sentence)
