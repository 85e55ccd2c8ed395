"""The versions of Python that docs/stability.md lists are those of the package and of CI."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_runs_each_supported_version_of_python_from_the_oldest_that_the_package_allows():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    versions = re.findall(r'"(3\.\d+)"', re.search(r"matrix: \{python: (.*?)\}", workflow)[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions[0]}"
    page = (ROOT / "docs/stability.md").read_text()
    table = page[page.index("| Python |") : page.index("`.github/workflows/test.yml`")]
    assert [version for version in versions if version not in table] == []
