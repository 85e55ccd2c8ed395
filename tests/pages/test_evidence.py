"""`silodp export evidence`: an archive that stands alone, says nothing without a source, and goes
red at every changed byte.
"""

import io
import json
import re
import shutil
import zipfile
from pathlib import Path

import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from silodp.core.errors import BadInput
from silodp.pages import evidence

SCHEMA = json.loads((Path(__file__).parent / "registry-schema.json").read_text())


@pytest.fixture(scope="module")
def federated(gated, tmp_path_factory):
    """The folder of a real run over a real gate."""
    folder = tmp_path_factory.mktemp("evident") / "runs/ours"
    folder.parent.mkdir()
    for _ in gated.conduct(folder):
        pass
    return folder


@pytest.fixture
def made(federated, tmp_path, silodp):
    out = tmp_path / "ours.zip"
    words = [
        "export",
        "evidence",
        federated,
        "--out",
        out,
        "--key",
        tmp_path / "our.key",
        "--use",
        "Triage",
        "--curator",
        "Two clinics",
    ]
    code, _, wrong = silodp(*words)
    assert code == 0, wrong
    return out


def test_the_archive_of_a_federations_run_verifies_without_the_run_and_holds_what_each_form_asks(
    made, federated, tmp_path, silodp, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(made, elsewhere / "given.zip")
    shutil.move(federated, federated.with_name("gone"))
    monkeypatch.chdir(elsewhere)
    code, said, wrong = silodp("export", "evidence", "verify", "given.zip")
    shutil.move(federated.with_name("gone"), federated)
    assert code == 0, wrong
    assert "The archive is unchanged since it was signed" in said
    found = evidence.verify((elsewhere / "given.zip").read_bytes())
    assert {
        "registry.yaml",
        "nist-sp-800-226.md",
        "edpb-28-2024.md",
        "egress.md",
        "model-card.md",
        "spends.json",
        "ledgers.json",
    } <= found.files.keys()
    heads = json.loads(found.files["ledgers.json"])["heads"]["clinic"]
    assert re.fullmatch("[0-9a-f]{64}", heads["head"])
    assert heads["count"] > 0


def test_the_registrys_entry_is_valid_by_the_registrys_own_schema_and_has_the_runs_price(made):
    found = evidence.verify(made.read_bytes())
    entry = json.loads(found.files["registry.yaml"])
    check = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())
    check.validate(entry)
    with pytest.raises(jsonschema.ValidationError):
        check.validate(entry | {"status": "Perfect"})
    spent = json.loads(found.files["spends.json"])["privacy"]["silos"][0]
    said = entry["deployment"]["privacy_loss"]["privacy_parameters"]
    assert spent["epsilon"] <= said["epsilon"] <= spent["epsilon"] * 1.001
    assert spent["delta"] <= said["delta"] <= spent["delta"] * 1.01


def test_a_federations_price_is_said_to_be_of_training_alone_since_only_ledgers_add_evaluations(
    made,
):
    found = evidence.verify(made.read_bytes())
    loss = json.loads(found.files["registry.yaml"])["deployment"]["privacy_loss"]
    for text in (loss["privacy_parameters_details"], found.files["nist-sp-800-226.md"].decode()):
        assert "training only; each silo's ledger adds evaluations, profiles and other runs" in text
        assert "evaluations together" not in text


def test_the_egress_names_each_evaluation_with_what_it_may_have_cost(federated, tmp_path, silodp):
    run = shutil.copytree(federated, tmp_path / "evaluated")
    told = [
        {
            "scores": [],
            "silos": [{"name": "clinic", "epsilon": 2.72, "delta": 1e-6}],
            "groups": {"by": "sex", "rows": [], "note": ""},
        },
        {
            "scores": [{"name": "all", "held_out": 9, "classes": 2, "figures": {}}],
            "silos": [{"name": "clinic", "epsilon": 4.0, "delta": 1e-6}],
        },
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    code, _, wrong = silodp(
        "export", "evidence", run, "--out", tmp_path / "e.zip", "--key", tmp_path / "our.key"
    )
    assert code == 0, wrong
    page = evidence.verify((tmp_path / "e.zip").read_bytes()).files["egress.md"].decode()
    said = "private answers about held-out records"
    assert (
        f"| Evaluation 1 | {said}, by sex: clinic at most epsilon 2.72 at delta 1e-06 | "
        "evaluations.json |"
    ) in page
    assert (
        f"| Evaluation 2 | {said}: clinic at most epsilon 4 at delta 1e-06 | evaluations.json |"
        in page
    )


def test_every_statement_has_a_source_in_the_archive_or_says_that_it_is_not_covered(made):
    found = evidence.verify(made.read_bytes())
    for name in ("nist-sp-800-226.md", "edpb-28-2024.md", "egress.md"):
        rows = [
            line.strip("| ").split(" | ")
            for line in found.files[name].decode().splitlines()
            if line.startswith("| ")
        ][1:]
        assert len(rows) >= 5
        for _, _, source in rows:
            file = source.split(",")[0]
            assert file in (*found.files, "SECURITY.md", evidence.MANIFEST) or source.startswith(
                "not covered"
            ), source


def test_no_changed_byte_of_the_archive_is_believed(made):
    raw = made.read_bytes()
    central = raw.index(b"PK\x01\x02")
    places = {
        *range(0, len(raw), max(1, len(raw) // 150)),
        *range(100),
        *range(central, len(raw), 7),
        len(raw) - 1,
    }
    for place in sorted(places):
        changed = bytearray(raw)
        changed[place] ^= 1
        with pytest.raises(BadInput):
            evidence.verify(bytes(changed))
    for other in (raw + b"\0", raw[:-1], b"\0" + raw, b"", b"PK"):
        with pytest.raises(BadInput):
            evidence.verify(other)


def test_a_file_cannot_be_added_swapped_or_signed_by_somebody_else(made):
    raw = made.read_bytes()
    found = evidence.verify(raw)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for change in (
        {"more.txt": b"x"},
        {"model-card.md": b"A perfect model.\n"},
        {evidence.MANIFEST: members[evidence.MANIFEST] + b" "},
    ):
        with pytest.raises(BadInput):
            evidence.verify(evidence._zipped(members | change))
    forged = evidence.pack(
        {**found.files, "model-card.md": b"A perfect model.\n"},
        found.about,
        Ed25519PrivateKey.generate(),
    )
    assert evidence.verify(forged).key != found.key, (
        "whose key it is, is for the reader to find out"
    )
    with pytest.raises(BadInput, match="not by the key that you expect"):
        evidence.verify(forged, found.key)


def test_no_path_of_this_machine_is_in_what_is_signed(made, federated, gated):
    for name, content in evidence.verify(made.read_bytes()).files.items():
        for path in (str(federated.parent), str(gated.folder), str(Path.home())):
            assert path.encode() not in content, f"{path} is in {name}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "evidence", "nowhere"], "nowhere"),
        (["export", "evidence", "verify"], "verify needs an archive"),
        (["export", "evidence", "verify", "nowhere.zip"], "cannot be read"),
        (["export", "evidence", "RUN", "--sector", "Magic"], "the registry has only"),
        (["export", "evidence", "RUN", "--ledger", "KEY"], "silodp ledger show --json"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(words, said, federated, tmp_path, silodp, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("KEY").write_text("no")
    code, _, wrong = silodp(*(federated if word == "RUN" else word for word in words))
    assert code == 2
    assert said in wrong
    assert not list(tmp_path.glob("*.zip"))
