"""A shuffler is made before its silos, which need its key, and gets its members afterwards."""

import json
import stat

import pytest

from mixing import ROSTER, SERVER
from silodp.core.errors import BadInput
from silodp.host.keys import public
from silodp.shuffler.provision import enrol, provision
from silodp.shuffler.settings import ShufflerSettings


def test_a_shuffler_without_members_is_not_served_until_they_are_enrolled(tmp_path):
    provision(tmp_path / "m", askers=[public(SERVER)], members=())
    path = tmp_path / "m/shuffler.toml"
    with pytest.raises(BadInput, match="roster"):
        ShufflerSettings.load(path)
    with pytest.raises(BadInput, match="roster"):
        enrol(path, ROSTER[:1])
    before = path.read_text().splitlines()
    assert enrol(path, ROSTER[:2]) == 2
    assert enrol(path, ROSTER[1:3]) == 3, "who is a member already is enrolled once"
    assert ShufflerSettings.load(path).roster == tuple(ROSTER[:3])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [line for line in path.read_text().splitlines() if line not in before] == [
        f"roster = {json.dumps(ROSTER[:3])}"
    ]


@pytest.mark.parametrize("member", ["", "ab", "X" * 64, 'a"] #'])
def test_what_is_no_pseudonym_is_not_enrolled(tmp_path, member):
    provision(tmp_path / "m", askers=[public(SERVER)], members=ROSTER[:2])
    path = tmp_path / "m/shuffler.toml"
    before = path.read_bytes()
    with pytest.raises(BadInput, match="roster is"):
        enrol(path, [member])
    assert path.read_bytes() == before


def test_a_roster_that_was_written_by_hand_over_several_lines_is_left_to_the_hand(tmp_path):
    provision(tmp_path / "m", askers=[public(SERVER)], members=ROSTER[:2])
    path = tmp_path / "m/shuffler.toml"
    path.write_text(path.read_text().replace("roster = [", "roster = [\n"))
    before = path.read_bytes()
    with pytest.raises(BadInput, match="by hand"):
        enrol(path, ROSTER[2:3])
    assert path.read_bytes() == before
    with pytest.raises(BadInput, match="cannot be read"):
        enrol(tmp_path / "none.toml", ROSTER)
