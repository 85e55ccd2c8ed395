"""Every known mistake with masks is caught by its probe, and the shipped masker passes them all."""

import pytest

from silodp.lab.audit import mutants
from silodp.lab.audit.pipeline import SOUND, Caught
from silodp.lab.audit.probes_masked import MASKED

CAUGHT_BY = {
    "mask reused between queries": "masks", "counts without masks": "masks", "cohort not checked": "tables", "unpinned key accepted": "tables",
    "unsigned key accepted": "tables", "noise of absent silos counted": "tables", "noise of colluding silos counted": "tables",
    "own noise not checked": "tables", "same counts under two cohorts": "two cohorts", "wrap-around not checked": "tables",
    "keys that outlive a restart": "masks", "keys that outlive their answer": "masks",
    "attempts without end": "two cohorts",
}  # fmt: skip


def test_every_mistake_with_masks_has_the_probe_that_catches_it():
    assert mutants.OF_MASKS.keys() == CAUGHT_BY.keys()


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_planted_mistake_with_masks_is_caught(name, tmp_path):
    with pytest.raises(Caught):
        MASKED[CAUGHT_BY[name]](mutants.MUTANTS[name], 0, tmp_path)


@pytest.mark.parametrize("probe", MASKED)
def test_the_shipped_masker_is_caught_by_none(probe, tmp_path):
    MASKED[probe](SOUND, 0, tmp_path)
