"""The table of docs/vetting.md has a row for each statistic, mechanism, sampling and rule."""

import re
from pathlib import Path

from silodp.audit import answers
from silodp.core.mechanisms import MECHANISMS
from silodp.core.privacy.accounting import GDP, Committed, Renyi
from silodp.core.sampling import SAMPLINGS
from silodp.core.statistics import STATISTICS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(\w+)` \| `([\w/.]+)` \| `([\w/.]+)` \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = {row[0]: row[1:] for row in ROW.findall((ROOT / "docs/vetting.md").read_text())}
AUDITED = {**STATISTICS, **MECHANISMS, **SAMPLINGS}
RULES = {kind.__name__: kind for kind in (GDP, Renyi, Committed)}


def test_each_part_has_a_row_with_its_proof_and_its_tests():
    assert ROWS.keys() == AUDITED.keys() | RULES.keys(), "docs/vetting.md needs a row for each part"
    for name, (proof, tests, _, _) in ROWS.items():
        kind = (AUDITED | RULES)[name]
        assert kind.__module__ == "silodp." + proof.removesuffix(".py").replace("/", "."), name
        assert re.search(rf"\b{name}\b", (ROOT / tests).read_text()), name


def test_what_is_called_audited_has_an_example_in_the_audit():
    examples = {
        kind.__name__
        for kinds in (answers.EXAMPLES, answers.MECHANISMS, answers.SAMPLINGS)
        for kind in kinds
    }
    audited = {name for name, (_, _, audit, _) in ROWS.items() if audit == "yes"}
    assert audited == examples
    assert {ROWS[name][2] for name in RULES} == {"second calculation"}


def test_no_reviewer_is_claimed_without_a_date_and_a_commit():
    for name, (*_, reviewer) in ROWS.items():
        named = re.search(r"20\d\d-\d\d-\d\d, [0-9a-f]{7,}", reviewer)
        assert reviewer == "none yet" or named, name
