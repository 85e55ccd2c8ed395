"""The maps that ship, and a user's: functions of one record alone, named by what they are."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import silodp
from silodp.core.errors import BadInput
from silodp.core.features import maps
from silodp.core.features.feature_map import feature_map
from silodp.core.problem.build import Words, build
from silodp.core.problem.task import Task
from silodp.host import shipped
from silodp.host.extension import load

PICTURES = torch.rand(7, 3 * 32 * 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
CONSTANTS = {
    "photo": "1aa14855e65293fbd708f107a8173bc0877e1ec4206a57112d2d58109515907b",
    "digit": "5b9031171c19921166d55a6a5c9f628a11b80072da365768e03119586bbf3564",
}


@pytest.mark.parametrize("text", ["photo:20", "digit"])
def test_a_record_changes_no_bit_of_the_features_of_another(text):
    """Were it otherwise, replacing one record would move several gradients, and the price would be
    for one.
    """
    mapped = feature_map(text, load)
    before, other = mapped.of(PICTURES), PICTURES.clone()
    other[3] = 1.0
    after = mapped.of(other)
    assert not torch.equal(before[3], after[3])
    assert all(torch.equal(before[k], after[k]) for k in range(7) if k != 3)


@pytest.mark.parametrize(
    ("text", "width"), [("photo", 128), ("photo:256", 256), ("photo:1", 1), ("digit", 190)]
)
def test_features_have_one_public_norm_and_the_width_that_was_asked_for(text, width):
    mapped = feature_map(text, load)
    assert mapped.width(3072) == width
    assert mapped.of(PICTURES).shape == (7, width)
    assert torch.allclose(mapped.of(PICTURES).norm(dim=1), torch.tensor(maps.NORM))


def test_a_photograph_and_its_mirror_image_have_the_same_features():
    mirrored = PICTURES.reshape(-1, 3, 32, 32).flip(3).flatten(1)
    mapped = feature_map("photo:64", load)
    assert torch.allclose(mapped.of(PICTURES), mapped.of(mirrored), atol=1e-4)


def test_fewer_features_are_the_first_of_more_up_to_their_norm():
    few, more = (
        feature_map("photo:10", load).of(PICTURES),
        feature_map("photo:256", load).of(PICTURES)[:, :10],
    )
    assert torch.allclose(few, maps.NORM * torch.nn.functional.normalize(more), atol=1e-5)


def test_dark_ink_on_white_paper_is_read_like_light_ink():
    digit = torch.full((1, 28, 28), -1.0)
    digit[:, 6:22, 13:16] = 1
    mapped = feature_map("digit", load)
    assert torch.allclose(
        mapped.of(digit.reshape(1, -1)), mapped.of(-digit.reshape(1, -1)), atol=1e-5
    )


@pytest.mark.parametrize("shape", [(1, 40, 24), (3, 50, 50)])
def test_pictures_of_other_sizes_are_taken_by_their_shape(shape):
    x = torch.rand(2, shape[0] * shape[1] * shape[2]) * 2 - 1
    assert feature_map("photo:5", load, shape).of(x).shape == (2, 5)


@pytest.mark.parametrize("text", ["photo:0", "photo:257", "photo:x", "digit:3", "hog"])
def test_an_unknown_map_is_refused_with_those_that_there_are(text):
    with pytest.raises(BadInput, match=r"photo:M with M from 1 to 256, digit, or FILE.py:NAME"):
        feature_map(text, load)


def test_records_that_are_no_pictures_are_refused():
    with pytest.raises(BadInput, match="records of 30 numbers are no pictures"):
        build(Words("logistic", Task.plain(2), features="photo"), 30, load=load)


@pytest.mark.parametrize("name", ["photo", "digit"])
def test_constants_are_those_that_were_learnt_from_public_pictures(name):
    data = (shipped.HERE / f"{name}.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == CONSTANTS[name]


def test_a_definition_names_the_map_its_width_and_its_code(monkeypatch, tmp_path):
    def definition(text):
        return build(Words("logistic", Task.plain(10), features=text), 3072, load=load).definition()

    assert "features silodp.photo:64 sha256 " in definition("photo:64")
    assert definition("photo:64") != definition("photo:65")
    before = definition("photo:64")
    (tmp_path / "pictures.py").write_text("another")
    monkeypatch.setattr(shipped, "CODE", (tmp_path / "pictures.py", *shipped.CODE[1:]))
    shipped.constants.cache_clear()
    assert definition("photo:64") != before
    monkeypatch.undo()
    shipped.constants.cache_clear()
    assert definition("photo:64") == before


def test_core_reads_no_file():
    reads = re.compile(
        r"\bopen\(|read_bytes|read_text|load_file|importlib\.resources|pkgutil\.get_data|np\.load|torch\.load"
    )
    root = Path(silodp.__file__).parent / "core"
    assert [str(path) for path in root.rglob("*.py") if reads.search(path.read_text())] == []


OWN = """
import torch


def random(x):
    return x + torch.randn_like(x)


def vary(x):
    return x[: 2 + int(x[0] > 0)]


def fails(x):
    raise ValueError("no map")


seen = []


def remembers(x):
    seen.append(x)
    return x + len(seen)


def picky(x):
    if x[0] > 1:
        raise ValueError(f"found {x[0]:g}")
    return x
"""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "random",
            ("random differ when they are computed again; make them depend on the record alone$"),
        ),
        ("remembers", "remembers differ when they are computed again"),
        (
            "vary",
            "vary cannot be computed .RuntimeError: stack expects each tensor to be equal size",
        ),
        ("fails", "fails cannot be computed .ValueError: no map.; correct the function$"),
    ],
)
def test_a_map_is_tried_twice_and_the_reason_why_it_fails_is_said(tmp_path, name, sentence):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(BadInput, match=sentence):
        build(Words("logistic", Task.plain(2), features=f"{tmp_path}/own.py:{name}"), 3, load=load)


def test_the_reason_why_a_map_fails_on_a_record_is_not_said_since_it_could_hold_the_record(
    tmp_path,
):
    (tmp_path / "own.py").write_text(OWN)
    mapped = feature_map(f"{tmp_path}/own.py:picky", load)
    assert mapped.width(3) == 3
    sentence = r"picky cannot be computed \(ValueError\); correct the function$"
    with pytest.raises(BadInput, match=sentence):
        mapped.of(torch.full((1, 3), 37.0))


ENCODER = """
from pathlib import Path

import torch

from silodp import frozen

WEIGHTS = frozen(Path(__file__).with_name("encoder.safetensors"), "{}")


def encode(row):
    return torch.tanh(WEIGHTS["layer"] @ row)
"""


def test_a_frozen_encoder_is_pinned_by_the_file_that_names_its_weights(tmp_path):
    weights, file = tmp_path / "encoder.safetensors", tmp_path / "encoder.py"
    save_file({"layer": torch.eye(4)[:2]}, weights)
    file.write_text(ENCODER.format(hashlib.sha256(weights.read_bytes()).hexdigest()))
    x = torch.randn(3, 4)
    assert torch.equal(feature_map(f"{file}:encode", load).of(x), torch.tanh(x[:, :2]))
    save_file({"layer": torch.ones(2, 4)}, weights)
    other = tmp_path / "again.py"
    other.write_text(file.read_text() + "# read anew\n")
    with pytest.raises(BadInput, match=r"encoder.safetensors have the SHA-256 .* was approved"):
        feature_map(f"{other}:encode", load)
    with pytest.raises(BadInput, match="cannot be read"):
        silodp.frozen(tmp_path / "absent.safetensors", "0" * 64)
