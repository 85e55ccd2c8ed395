"""Units, compose file and chart hold together: what they name exists, the gate has no network and
nobody more than he needs.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import typer

from silodp import __version__
from silodp.cli import app as cli

DEPLOY = Path(__file__).parents[2] / "deploy"
yaml = pytest.importorskip("yaml")


def unit(name):
    found = {}
    for line in (DEPLOY / f"silodp-{name}.service").read_text().splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


class Strict(yaml.SafeLoader):
    """YAML in which no key is there twice, of which the last would win in silence."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key is there twice: {node.start_mark}"
        return super().construct_mapping(node, deep)


def rendered(name, values, used=None):
    """A template with the chart's values in it; the chart uses no more of Helm's language than
    this: one condition around all, names and quotes.
    """
    text = (DEPLOY / "helm/templates" / name).read_text()
    whole = re.fullmatch(
        r"\{\{- if \.Values\.(\w+)\.enabled \}\}\n(.*)\{\{- end \}\}\n", text, re.DOTALL
    )
    assert whole, name
    assert values[whole[1]]["enabled"] is False, "a part is run where it is asked for"

    def value(found):
        words = found[1].split(".")[1:]
        if words == ["Release", "Name"]:
            return "north"
        assert words[0] == "Values"
        here = values
        for word in words[1:]:
            here = here[word]
        if used is not None:
            used.add(".".join(words[1:]))
        return f'"{here}"' if found[2] else str(here)

    made = re.sub(r"\{\{ (\.[\w.]+)( \| quote)? \}\}", value, whole[2])
    assert "{{" not in made, "there is more of Helm's language than this test knows"
    return list(yaml.load_all(made, Strict))


@pytest.fixture
def values():
    return yaml.safe_load((DEPLOY / "helm/values.yaml").read_text())


@pytest.mark.parametrize("name", ["gate", "courier", "server", "shuffler"])
def test_every_unit_is_closed_and_starts_what_is_installed(name):
    found = unit(name)
    for key, value in {
        "ProtectSystem": "strict",
        "NoNewPrivileges": "true",
        "CapabilityBoundingSet": "",
        "UMask": "0077",
        "LimitCORE": "0",
    }.items():
        assert found[key] == [value]
    assert found["ExecStart"][0].startswith("/opt/silodp/bin/")
    assert (found.get("PrivateNetwork") == ["true"]) == (name in ("gate", "shuffler"))


def test_the_compose_file_names_every_image_and_gives_gate_and_shuffler_no_network():
    composed = yaml.load((DEPLOY / "compose.yaml").read_text(), Strict)
    targets = set(
        re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    )
    for name, service in composed["services"].items():
        assert service["image"].removeprefix("silodp-").partition(":")[0] in targets
        assert service["image"].endswith(f":{__version__}")
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert (service.get("network_mode") == "none") == (name in ("gate", "shuffler"))
        assert (
            not any(
                "/silo" in volume.split(":")[0] or "records" in volume
                for volume in service["volumes"]
            )
            or name == "gate"
        )
    if shutil.which("docker"):
        done = subprocess.run(
            ["docker", "compose", "-f", DEPLOY / "compose.yaml", "--profile", "*", "config", "-q"],
            capture_output=True,
            text=True,
        )
        assert (
            done.returncode == 0
            or "is not a docker command" in done.stderr
            or "unknown" in done.stderr
        ), done.stderr


def test_every_image_that_starts_silodp_names_a_group_that_exists():
    text = (DEPLOY / "Containerfile").read_text()
    entries = [json.loads(words) for words in re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)]
    started = [words[1:] for words in entries if words[0] == "silodp"]
    assert started == [["silo"], ["federation", "shuffler"]]
    for words in started:
        found = typer.main.get_command(cli.app)
        for word in words:
            assert isinstance(found, click.Group)
            found = found.commands[word]


def test_the_base_image_is_pinned_to_an_exact_version():
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-|@sha256:[0-9a-f]{64}$", base)


def test_the_chart_keeps_the_gate_off_the_network_and_away_from_the_couriers_pod(values):
    made = {(one["kind"], one["metadata"]["name"]): one for one in rendered("silo.yaml", values)}
    gate, courier = made["StatefulSet", "north-gate"], made["Deployment", "north-courier"]
    closed = made["NetworkPolicy", "north-gate-has-no-network"]["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & closed.keys()
    assert (
        closed["podSelector"]["matchLabels"].items()
        <= gate["spec"]["template"]["metadata"]["labels"].items()
    )
    own, others = (
        [
            volume
            for volume in pod["spec"]["template"]["spec"]["volumes"]
            if "emptyDir" not in volume
        ]
        for pod in (gate, courier)
    )
    assert [volume["name"] for volume in own if volume in others] == ["socket"]
    assert (
        gate["spec"]["template"]["spec"]["nodeName"]
        == courier["spec"]["template"]["spec"]["nodeName"]
    )


@pytest.mark.parametrize("name", ["silo.yaml", "server.yaml", "shuffler.yaml"])
def test_every_container_of_the_chart_is_closed_and_of_an_image_that_is_built(values, name):
    targets, pods = (
        (DEPLOY / "Containerfile").read_text(),
        [one for one in rendered(name, values) if one["kind"] in ("StatefulSet", "Deployment")],
    )
    assert pods
    for pod in pods:
        spec = pod["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert f" AS {container['image'].partition('silodp-')[2].partition(':')[0]}\n" in targets
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }


def test_every_value_of_the_chart_is_used_and_every_object_is_whole(values):
    used: set[str] = set()
    for path in sorted((DEPLOY / "helm/templates").iterdir()):
        made = rendered(path.name, values, used)
        assert all({"apiVersion", "kind", "metadata", "spec"} <= one.keys() for one in made)
        names = [(one["kind"], one["metadata"]["name"]) for one in made]
        assert len(set(names)) == len(names)
        for pod in (one for one in made if one["kind"] in ("StatefulSet", "Deployment")):
            assert (
                pod["spec"]["selector"]["matchLabels"]
                == pod["spec"]["template"]["metadata"]["labels"]
            )
            limits = (
                pod["spec"]["template"]["spec"]["containers"][0]
                .get("resources", {})
                .get("limits", {})
            )
            assert all(isinstance(limit, str) for limit in limits.values())
    given = {
        f"{part}.{name}"
        for part, more in values.items()
        if isinstance(more, dict)
        for name in more
        if name != "enabled"
    }
    assert used == given | {name for name, more in values.items() if not isinstance(more, dict)}


def test_chart_and_images_have_the_packages_version(values):
    chart = yaml.safe_load((DEPLOY / "helm/Chart.yaml").read_text())
    assert chart["appVersion"] == values["tag"] == __version__
