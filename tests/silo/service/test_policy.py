"""The policy file: every field is needed and checked, and each limit refuses with a code of its
own.
"""

import dataclasses
import re
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import silodp
from silodp.core.errors import BadInput, Refused
from silodp.core.mechanisms import Gaussian
from silodp.core.protocol.codec import Envelope
from silodp.core.protocol.refusals import CODES
from silodp.core.query import Query
from silodp.core.sampling import DisjointBatches, Poisson, WithoutReplacement
from silodp.core.statistics import Grad, GradDiff, LocalSteps
from silodp.host.tables import of_table
from silodp.silo.service.policy import Policy

MODEL, ASKER = "ab" * 32, "cd" * 32
TOML = f"""
silo = "hospital-a"
epsilon = 2
delta = 1e-6
definition = "{MODEL}"
statistics = ["Grad", "LocalSteps"]
samplings = ["FullBatch", "DisjointBatches", "Poisson", "WithoutReplacement"]
clip = [0.001, 10.0]
minimum_noise_multiplier = 1.0
minimum_batch = 20
maximum_local_steps = 5
queries_per_run = 3
queries_per_hour = 4
expires = 2027-06-30
answer_after = 0.5
askers = ["{ASKER}"]
"""
NOON = datetime(2027, 6, 30, 12, tzinfo=UTC).timestamp()
W = torch.zeros(1, 3)


def written(tmp_path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def policy(tmp_path) -> Policy:
    return Policy.load(written(tmp_path, TOML))


def asked(
    statistic=None, clip=1.0, noise=2.0, model=MODEL, of="hospital-a", **sampling
) -> Envelope:
    return Envelope(
        of,
        "run",
        "id",
        model,
        Query(Grad(W) if statistic is None else statistic, Gaussian("a", clip, noise, **sampling)),
    )


def test_a_policy_is_read_with_every_field(policy):
    assert (policy.budget.epsilon, policy.clip, policy.expires) == (
        2.0,
        (0.001, 10.0),
        date(2027, 6, 30),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.epsilon = 9


def test_a_policy_of_before_holds_has_their_defaults_and_each_is_checked(tmp_path, policy):
    assert (policy.hold_share, policy.holds_per_asker, policy.hold_seconds, policy.sees_left) == (
        1.0,
        4,
        3600,
        (),
    )
    for line in (
        "hold_share = 0",
        "hold_share = 1.5",
        "hold_share = true",
        "holds_per_asker = 0",
        "holds_per_asker = 1.5",
        "hold_seconds = 0",
        "hold_seconds = 1e9",
        'sees_left = "all"',
        f'sees_left = ["{"0" * 64}"]',
    ):
        with pytest.raises(BadInput, match=line.split(" ")[0]):
            Policy.load(written(tmp_path, f"{line}\n{TOML}"))
    assert (
        Policy.load(written(tmp_path, f'sees_left = ["{policy.askers[0]}"]\n{TOML}')).sees_left
        == policy.askers[:1]
    )


@pytest.mark.parametrize(
    "name",
    [field.name for field in dataclasses.fields(Policy) if field.default is dataclasses.MISSING],
)
def test_a_missing_misspelt_or_mistyped_field_is_named(tmp_path, name):
    absent = () if name == "answer_after" else ("",)  # older policies have none
    for new in (
        *absent,
        f"{name}s = 1\n",
        f"{name} = {{}}\n",
        f"{name} = true\n",
        f"{name} = []\n",
        f"{name} = -1\n",
        f'{name} = ""\n',
    ):
        with pytest.raises(BadInput, match=name):
            Policy.load(written(tmp_path, re.sub(rf"(?m)^{name} = .*\n", new, TOML)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", "inf"),
        ("epsilon", "nan"),
        ("epsilon", "0"),
        ("epsilon", "1" + "0" * 400),
        ("delta", "1.0"),
        ("clip", "[1.0]"),
        ("clip", "[2.0, 1.0]"),
        ("clip", "[0.0, 1.0]"),
        ("clip", "[1.0, inf]"),
        ("clip", "[1.0, true]"),
        ("statistics", '["Loss"]'),
        ("statistics", '"Grad"'),
        ("samplings", "[[]]"),
        ("minimum_noise_multiplier", "0.0"),
        ("minimum_batch", "0"),
        ("queries_per_run", "1.5"),
        ("queries_per_hour", "99999999999"),
        ("expires", '"2027-06-30"'),
        ("expires", "2027-06-30T12:00:00"),
        ("askers", '["12"]'),
        ("askers", f'["{ASKER.upper()}"]'),
        ("definition", f'"{MODEL}0"'),
        ("silo", '"two words"'),
    ],
)
def test_a_senseless_value_is_refused_in_one_sentence(tmp_path, name, value):
    with pytest.raises(BadInput, match=f"policy: {name} is .*must") as error:
        Policy.load(written(tmp_path, re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", TOML)))
    assert "\n" not in str(error.value)


def test_an_unknown_field_a_table_and_a_file_that_is_no_toml_are_refused(tmp_path):
    for text, word in (
        (TOML + "seed = 3\n", "unknown"),
        (TOML + "[noise]\noff = true\n", "unknown"),
        (TOML + "=", "not TOML"),
    ):
        with pytest.raises(BadInput, match=word):
            Policy.load(written(tmp_path, text))
    with pytest.raises(BadInput, match="cannot be read"):
        Policy.load(tmp_path / "nowhere.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(BadInput, match="cannot be read"):
        Policy.load(tmp_path / "binary")


@pytest.mark.parametrize(
    ("envelope", "code"),
    [
        (asked(model="00" * 32), "model"),
        (asked(GradDiff(W, W)), "statistic"),
        (asked(clip=10.1), "clip"),
        (asked(clip=5e-324), "clip"),
        (asked(clip=-1.0), "clip"),
        (asked(of="hospital-b"), "silo"),
        (asked(noise=0.999), "noise"),
        (asked(noise=-1.0), "noise"),
        (asked(noise=0.0), "noise"),
        (asked(LocalSteps(W, 6, 0.1)), "steps"),
        (asked(LocalSteps(W, 0, 0.1)), "steps"),
        (asked(LocalSteps(W, 10**9, 0.1)), "steps"),
        (asked(sampling=DisjointBatches(6)), "batch"),
        (asked(sampling=DisjointBatches(0)), "batch"),
        (asked(sampling=DisjointBatches(-1)), "batch"),
        (asked(sampling=Poisson(0.19)), "batch"),
        (asked(sampling=Poisson(1e-300)), "batch"),
        (asked(sampling=Poisson(1.01)), "batch"),
        (asked(sampling=WithoutReplacement(1e308)), "batch"),
        (asked(sampling=WithoutReplacement(0.199)), "batch"),
    ],
)
def test_each_limit_refuses_with_its_code(policy, envelope, code):
    with pytest.raises(Refused) as refusal:
        policy.check(envelope, ASKER, n=100, now=NOON)
    assert refusal.value.code == code


def test_what_is_within_the_limits_passes(policy):
    samplings = [
        {"sampling": s} for s in (DisjointBatches(5), Poisson(0.2), WithoutReplacement(0.2))
    ]
    for envelope in (
        asked(),
        asked(clip=0.001),
        asked(clip=10.0),
        asked(clip=0.0),
        asked(noise=1.0),
        asked(LocalSteps(W, 5, 0.1)),
    ):
        policy.check(envelope, ASKER, n=100, now=NOON)
    for sampling in samplings:
        policy.check(asked(**sampling), ASKER, n=100, now=NOON)


def test_another_asker_and_the_day_after_the_last_are_refused(policy):
    with pytest.raises(Refused, match="asker"):
        policy.check(asked(), MODEL, n=100, now=NOON)
    policy.check(asked(), ASKER, n=100, now=NOON + 12 * 3600 - 1)
    with pytest.raises(Refused, match="expired"):
        policy.check(asked(), ASKER, n=100, now=NOON + 12 * 3600)


def test_a_sampling_that_is_not_listed_is_refused(policy):
    with pytest.raises(Refused, match="sampling"):
        dataclasses.replace(policy, samplings=("Poisson",)).check(asked(), ASKER, n=100, now=NOON)


class Entries(list):
    def in_run(self, asker: str, run: str) -> int:
        return sum(name == run for name, _ in self)

    def since(self, time: float) -> int:
        return sum(stamp > time for _, stamp in self)


def test_rates_count_entries_of_the_run_and_of_the_last_hour(policy):
    entries = Entries([("a", NOON - 4000), ("a", NOON - 10), ("b", NOON - 3000)])
    policy.check_rate("asker", "a", now=NOON, counts=entries)
    with pytest.raises(Refused, match="run-limit"):
        policy.check_rate("asker", "a", now=NOON, counts=Entries([*entries, ("a", NOON - 9000)]))
    busy = Entries(
        [*entries, ("c", NOON - 5), ("c", NOON + 9e6)]
    )  # the last by a clock that has since been set back
    with pytest.raises(Refused, match="rate"):
        policy.check_rate("asker", "a", now=NOON, counts=busy)


def test_every_code_that_the_package_refuses_with_is_in_the_table():
    folder = Path(silodp.__file__).parent
    own = [
        path for path in folder.rglob("*.py") if folder / "shuffler" not in path.parents
    ]  # a shuffler has codes of its own
    source = "".join(path.read_text("utf-8") for path in own)
    used = set(re.findall(r'Refused\("([a-z-]+)"\)', source))
    assert used <= set(CODES)
    assert {"budget", "malformed", "shape", "clip"} <= used
    assert all(text.endswith(".") and "\n" not in text for text in CODES.values())


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False),
)
def test_whatever_numbers_a_query_has_the_policy_raises_nothing_but_its_codes(
    clip, noise, count, rate
):
    policy = of_table("policy", Policy, EVERYTHING)
    for statistic in (Grad(W), LocalSteps(W, count, rate)):
        for sampling in (DisjointBatches(count, count), Poisson(rate), WithoutReplacement(rate)):
            try:
                policy.check(
                    asked(statistic, clip, noise, sampling=sampling), ASKER, n=100, now=NOON
                )
            except Refused as refusal:
                known = refusal.code in CODES
            else:
                known = 0 <= clip <= 1e9 and noise >= 1e-3
            assert known


EVERYTHING = {
    "silo": "a",
    "epsilon": 1.0,
    "delta": 1e-6,
    "definition": MODEL,
    "statistics": ["Grad", "LocalSteps"],
    "samplings": ["DisjointBatches", "Poisson", "WithoutReplacement"],
    "clip": [1e-9, 1e9],
    "minimum_noise_multiplier": 1e-3,
    "minimum_batch": 1,
    "maximum_local_steps": 2**30,
    "queries_per_run": 1,
    "queries_per_hour": 1,
    "expires": date(9999, 1, 1),
    "askers": [ASKER],
}
