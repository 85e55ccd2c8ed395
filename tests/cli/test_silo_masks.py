"""`silodp silo key` and `silodp silo trust` as officers type them: who is pinned, by which words,
and what is refused with nothing pinned.
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from silodp.core.protocol.words import WORDS, fingerprint
from silodp.host.keys import public, read_key
from silodp.silo.service.masking import Masking


@pytest.fixture
def silos(silodp, tmp_path, monkeypatch):
    """Two silos as `silodp silo init` makes them, in the folder of the test; nobody sits at a
    terminal.
    """
    monkeypatch.setenv("SILODP_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for i, name in enumerate(("north", "south")):
        rng = np.random.default_rng(i)
        rows = [
            f"{u:.3f},{v:.3f},{k}"
            for u, v, k in zip(
                rng.normal(size=40), rng.normal(size=40), rng.integers(0, 2, 40), strict=True
            )
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["u,v,label", *rows]))
        words = (
            "--model",
            "logistic",
            "--epsilon",
            5,
            "--delta",
            1e-4,
            "--least",
            3,
            "--colluding",
            1,
        )
        code, out, err = silodp("silo", "init", name, "--data", f"{name}.csv", *words)
        assert code == 0, err
        assert (
            f"silodp silo key {name}/policy.toml, and silodp silo trust {name}/policy.toml "
            "OTHER/silo.json"
        ) in out.replace("\n", " ")
    return silodp


def words_of(silodp, name: str) -> str:
    """What the officer of this silo reads out."""
    return json.loads(silodp("silo", "key", f"{name}/policy.toml", "--json")[1])["words"]


def pinned() -> tuple[str, ...]:
    found = Masking.load("north/policy.toml")
    assert found is not None
    return found.members


def refused(result, *words: str) -> None:
    code, _, err = result
    assert (code, "Traceback" in err) == (2, False), err
    for word in words:
        assert word in err.replace("\n", " "), err
    assert pinned() == ()


def test_a_silos_words_are_those_of_the_key_that_its_gate_signs_with(silos, tmp_path):
    code, out, err = silos("silo", "key", "south/policy.toml")
    own = public(read_key(tmp_path / "south/silo.key"))
    assert code == 0, err
    assert f"south: {own}" in out
    assert fingerprint(own) in out.replace("\n", " ")
    words = words_of(silos, "south").split()
    assert len(words) == 16
    assert set(words) <= set(WORDS)
    assert words_of(silos, "north") != words_of(silos, "south")
    assert json.loads((tmp_path / "south/silo.json").read_text())["key"] == own


def test_the_words_that_an_officer_has_heard_pin_the_other_silo_and_nothing_else_changes(silos):
    before = Path("north/policy.toml").read_text()
    heard = words_of(silos, "south")
    code, out, err = silos(
        "silo", "trust", "north/policy.toml", "south/silo.json", "--words", f"  {heard.upper()} "
    )
    assert code == 0, err
    assert (
        "south is pinned; 1 other silos may be in a total with this one. Start the gate again"
        in out.replace("\n", " ")
    )
    own = json.loads(Path("south/silo.json").read_text())["key"]
    assert pinned() == (f"south {own}",)
    after = Path("north/policy.toml").read_text()
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [
        f'members = ["south {own}"]'
    ]
    again = silos(
        "silo", "trust", "north/policy.toml", "south/silo.json", "--words", heard, "--json"
    )
    assert json.loads(again[1]) == {"silo": "south", "key": own, "pinned": True}
    assert Path("north/policy.toml").read_text() == after


def test_without_words_nothing_is_pinned_nobody_is_asked_who_is_not_there_and_no_words_are_shown_to_copy(  # noqa: E501
    silos,
):
    code, out, err = silos("silo", "trust", "north/policy.toml", "south/silo.json")
    assert code == 0, err
    assert "Nothing is pinned yet. Call its officer" in out.replace("\n", " ")
    assert pinned() == ()
    told = silos("silo", "trust", "north/policy.toml", "south/silo.json", "--json")[1]
    assert json.loads(told)["pinned"] is False
    first = " ".join(words_of(silos, "south").split()[:2])
    assert first not in " ".join((out + told).split())


def test_a_card_whose_key_was_changed_on_the_way_and_words_misheard_are_refused(silos, tmp_path):
    """Whoever brings the card puts a key of his own into it; the telephone tells."""
    heard = words_of(silos, "south")
    card = json.loads((tmp_path / "south/silo.json").read_text())
    (tmp_path / "brought.json").write_text(
        json.dumps(card | {"key": public(read_key(tmp_path / "north/silo.key"))[::-1]})
    )
    trust = ("silo", "trust", "north/policy.toml")
    refused(
        silos(*trust, "brought.json", "--words", heard),
        "these are not the words of the key in brought.json",
        "ask south's officer",
    )
    first, *rest = heard.split()
    for wrong in (
        "",
        first,
        " ".join(rest),
        " ".join([*rest, first]),
        f"{heard} {first}",
        " ".join([WORDS[WORDS.index(first) - 1], *rest]),
    ):
        refused(
            silos(*trust, "south/silo.json", "--words", wrong), "not the words", "nothing is pinned"
        )


def test_a_silo_that_comes_with_a_new_key_is_not_pinned_over_the_old_one(silos, tmp_path):
    trust = ("silo", "trust", "north/policy.toml")
    silos(*trust, "south/silo.json", "--words", words_of(silos, "south"))
    card, before = json.loads((tmp_path / "south/silo.json").read_text()), pinned()
    (tmp_path / "new.json").write_text(json.dumps(card | {"key": "ab" * 32}))
    code, _, err = silos(*trust, "new.json", "--words", fingerprint("ab" * 32))
    assert code == 2
    assert "has another key of south pinned; if its officer confirms the new key" in err.replace(
        "\n", " "
    )
    (tmp_path / "renamed.json").write_text(json.dumps(card | {"name": "elsewhere"}))
    code, _, err = silos(*trust, "renamed.json", "--words", words_of(silos, "south"))
    assert code == 2
    assert "names one key twice" in err
    assert pinned() == before


def test_what_is_no_other_silo_or_no_policy_with_masks_is_refused_in_a_sentence(silos, tmp_path):
    own = words_of(silos, "north")
    refused(
        silos("silo", "trust", "north/policy.toml", "north/silo.json", "--words", own),
        "the key of this silo itself",
        "OTHER",
    )
    refused(
        silos("silo", "trust", "north/policy.toml", "north/policy.toml", "--words", own),
        "cannot be read",
    )
    refused(
        silos("silo", "trust", "north/policy.toml", "nowhere.json", "--words", own),
        "cannot be read",
    )
    refused(
        silos(
            "silo", "trust", "nowhere.toml", "south/silo.json", "--words", words_of(silos, "south")
        ),
        "nowhere.toml",
    )
    refused(silos("silo", "key", "nowhere.toml"), "nowhere.toml")
    text = (tmp_path / "south/policy.toml").read_text()
    (tmp_path / "south/policy.toml").write_text(text[: text.index("[masks]")])
    refused(
        silos("silo", "trust", "south/policy.toml", "north/silo.json", "--words", own),
        "no table [masks]",
    )
