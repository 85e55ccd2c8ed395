"""Day one: docs/deploy.md and docs/day-two.md as they stand, typed by a server's and two silos'
operators: machines, users and units of their own, through both engines.

What a person carries from one operator to another (a key read over the telephone, a card, a kit, a
certificate) the test carries. Day two, on the same machines: silos come and go, certificates are
renewed, a gate moves, while a run goes on. They run with SILODP_LONG set: together they take about
ten minutes of two cores.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from machines import Network, why_not

LACKING = (
    why_not() if "SILODP_LONG" in os.environ else "long; needs SILODP_LONG=1"
)  # to try takes a machine's start, in every worker
pytestmark = [pytest.mark.skipif(bool(LACKING), reason=LACKING), pytest.mark.xdist_group("deploy")]

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^ *<!-- (?P<step>\d+) (?P<who>\w+)(?: (?P<engine>\w+))? -->\n *```\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
ENGINE, RUN = 5, 9
"""The steps at which the server's engine is set up, and a run begins; what comes before is the same
for all engines, but for a key.
"""
SILOS = {"north": "10.98.0.2", "south": "10.98.0.3"}
LIBRARIES = f"""
own=/opt/silodp/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages
mkdir -p $own /opt/libraries /opt/silodp/bin
ln -s {sysconfig.get_path("purelib")}/* /opt/libraries/
for program in {Path(sys.executable).parent}/fl*; do
    sed "1s|.*|#!/opt/silodp/bin/python|" $program > /opt/silodp/bin/${{program##*/}}
    chmod 755 /opt/silodp/bin/${{program##*/}}
done
rm -f /opt/libraries/pip* /opt/libraries/*silodp* /opt/libraries/*.pth
echo /opt/libraries > $own/libraries.pth
"""
"""What silodp needs, as if pip had found it: this environment's libraries, but for pip and silodp
themselves.
"""
HOSTS = "10.98.0.1 fl.example.org\n"
PAGES = ("docs/deploy.md", "docs/day-two.md")


def blocks(engine):
    """(step, whose machine, script), in the order of the steps: of one engine, or with "" of what
    comes before there is one.
    """
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    found = [
        (int(block["step"]), block["who"], textwrap.dedent(block["text"]))
        for block in BLOCK.finditer(text)
        if (
            not block["engine"] and int(block["step"]) < ENGINE
            if not engine
            else block["engine"] == engine or (int(block["step"]) > ENGINE and not block["engine"])
        )
    ]
    return sorted(found, key=lambda block: block[0])


def records(seed):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(120, 3))
    rows = (
        "{:.6f},{:.6f},{:.6f},{}".format(*row, "yes" if row[0] + row[1] > 0 else "no") for row in x
    )
    return "\n".join(["age,pulse,weight,outcome", *rows]) + "\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder)
    words = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(folder),
        str(folder),
    ]
    subprocess.run(words, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def carry(here, source, there, target):
    """A folder, owners by number, over a channel that both trust."""
    packed = subprocess.run(
        ["tar", "-C", here.root + source, "--numeric-owner", "-c", "."],
        capture_output=True,
        check=True,
    ).stdout
    there.write("/root/carried.tar", packed)
    there.sh(
        f"mkdir -p {target} && tar -C {target} --numeric-owner -xpf carried.tar && rm carried.tar"
    )


class Deployment:
    """The machines, and what the operators hand to each other."""

    def __init__(self, network, wheel):
        self.engine, self.key, self.typed = "", "", ""
        self.server = network.machine("server", "10.98.0.1", HOSTS)
        self.silos = {
            name: network.machine(name, address, HOSTS) for name, address in SILOS.items()
        }
        self._network, self._wheel = network, wheel
        for number, machine in enumerate((self.server, *self.silos.values())):
            self._furnish(machine, number)

    def _furnish(self, machine, number):
        """What an operator has beside him: the package, the repository's folder of units, the
        records.
        """
        machine.write(f"/root/{self._wheel.name}", self._wheel.read_bytes())
        machine.sh(f"cp -r {ROOT}/deploy /root/deploy")
        machine.sh(LIBRARIES)
        machine.write("/root/records.csv", records(number))

    def another(self, name, number):
        """One more machine, with users and software."""
        machine = self._network.machine(name, f"10.98.0.{number}", HOSTS)
        self._furnish(machine, number)
        return machine

    def type_all(self, engine):
        self.engine = engine
        for step, who, script in blocks(engine):
            if step == RUN:
                self.await_silos()
            self.typed = script
            self._type(step, who, script)

    def forget_engine(self):
        """As before an engine was chosen, for the other one."""
        for machine in self.silos.values():
            machine.sh(
                "systemctl stop silodp-courier silodp-metrics && rm -rf kit ca.pem "
                "/var/lib/silodp-courier/site"
            )
        self.server.sh(
            "systemctl stop silodp-server && cd /var/lib/silodp-server && rm -rf fed first"
        )

    def _type(self, step, who, script):
        for name, machine in (
            {"server": self.server}.items() if who == "server" else self.silos.items()
        ):
            said = machine.sh(
                script.replace("KEY", self.key).replace("north", name) if who == "silo" else script
            )
            self._hand_over(step, name, machine, said)

    def _hand_over(self, step, name, machine, said):
        if step == 1:
            self.key = re.findall(r"^[0-9a-f]{64}$", said, re.MULTILINE)[-1]
        if step == 3:
            self.server.write(
                f"/root/{name}.json", machine.read("/var/lib/silodp-gate/silo/silo.json")
            )
        if (step, self.engine) == (4, "flower") and "flower.site key" in self.typed:
            self.server.write(
                f"/root/{name}.pub", machine.read("/var/lib/silodp-courier/site/node.pub")
            )
        if (step, self.engine) == (5, "nvflare"):
            for silo, its in self.silos.items():
                carry(self.server, f"/var/lib/silodp-server/fed/kits/{silo}", its, "/root/kit")
        if (step, self.engine) == (5, "flower"):
            for its in self.silos.values():
                its.write(
                    "/root/ca.pem", self.server.read("/var/lib/silodp-server/fed/server/ca.pem")
                )

    def connected(self):
        ask = "from silodp.wire.hub import Hub; print(*Hub('/run/silodp-server/hub.sock').names())"
        return self.server.sh(
            f'runuser -u silodp-server -- /opt/silodp/bin/python -P -c "{ask}"', check=False
        ).split()

    def await_silos(self, names=frozenset(SILOS)):
        self.wait(lambda: set(self.connected()) == set(names))

    def wait(self, until):
        deadline = time.monotonic() + 300
        while not until():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.5)

    def logs(self):
        machines = (self.server, *self.silos.values())
        return "\n".join(machine.logs() for machine in machines)


@pytest.fixture(scope="module")
def machines(wheel):
    """The machines with software, users and gates: the page up to where an engine is chosen."""
    with Network("one") as network:
        made = Deployment(network, wheel)
        made.type_all("")
        yield made


@pytest.fixture(scope="module", params=["nvflare", "flower"])
def deployed(request, machines):
    """The page, typed up to its last block: a federation that has had its first run."""
    pytest.importorskip({"nvflare": "nvflare", "flower": "flwr"}[request.param])
    machines.refused = {
        name: status(m)["refused"] for name, m in machines.silos.items()
    }  # a gate that moved was asked as it did
    machines.type_all(request.param)
    yield machines
    machines.forget_engine()


def test_the_page_as_it_stands_makes_a_federation_and_its_first_run(deployed):
    summary = json.loads(deployed.server.read("/var/lib/silodp-server/first/summary.json"))
    assert summary["ended"] == "finished"
    for name, machine in deployed.silos.items():
        status = json.loads(
            machine.sh(
                "runuser -u silodp-gate -- silodp silo status "
                "/var/lib/silodp-gate/silo/policy.toml --json"
            )
        )
        assert (status["silo"], status["running"], status["refused"]) == (
            name,
            True,
            deployed.refused[name],
        )
        assert status["answered"] >= 5
        assert 0 < status["spent_epsilon"] < 3
        machine.sh(
            "runuser -u silodp-gate -- silodp ledger verify /var/lib/silodp-gate/silo/ledger.db"
        )
        assert machine.read(f"/srv/silodp-anchor/{name}.anchor"), (
            "the anchor lies on the disk of its own"
        )
        told = machine.sh("curl --silent http://127.0.0.1:9464/metrics")
        assert 'silodp_up{role="gate"} 1' in told
        assert 'silodp_up{role="courier"} 1' in told
        assert 'silodp_certificate_days{role="courier"} 3' in told, "days left of a year"
    assert (
        'silodp_up{role="server"} 1'
        in deployed.server.read("/run/silodp-server/server.prom").decode()
    )


def test_systemd_finds_nothing_wrong_with_the_units(deployed):
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    for machine in (deployed.server, *deployed.silos.values()):
        assert (
            machine.sh("systemd-analyze verify --man=no /etc/systemd/system/silodp-*.service") == ""
        )


def test_the_gates_unit_reaches_no_network_and_writes_nowhere_but_its_own_folders(deployed):
    """By systemd itself, or by its stand-in, which does by namespaces what systemd does."""
    machine = deployed.silos["south"]
    inside = f"nsenter --target {machine.main_process('silodp-gate')} --mount --net --root"
    for path, may in {
        "/srv/silodp-anchor": True,
        "/var/lib/silodp-gate": True,
        "/run/silodp-gate": True,
        "/srv": False,
        "/etc": False,
        "/opt": False,
    }.items():
        said = machine.sh(f"{inside} touch {path}/probe && {inside} rm {path}/probe", check=False)
        assert ("Read-only file system" in said) != may, (path, said)
    assert [line.split()[0] for line in machine.sh(f"{inside} ip -br addr").splitlines()] == [
        "lo"
    ], "which systemd sets up, and nothing else"


POLICY, LEDGER = "/var/lib/silodp-gate/silo/policy.toml", "/var/lib/silodp-gate/silo/ledger.db"
AS_GATE = "runuser -u silodp-gate -- env SILODP_STATE=/var/lib/silodp-gate/state silodp"
AS_SERVER = "cd /var/lib/silodp-server && runuser -u silodp-server -- silodp"
RUNS = (
    "federation run --hub /run/silodp-server/hub.sock --key asker.key --algorithm mb-sgd "
    "--deadline 10 --retry 2 --patience 900 --epsilon 0.5"
)
ROUNDS = 400
RUNNING = "pgrep -u silodp-server -f 'bin/silodp federation run'"


def status(machine):
    return json.loads(machine.sh(f"{AS_GATE} silo status {POLICY} --json"))


def paced(machine, seconds):
    """A gate that takes so long for each answer: a run that takes its time, at no cost."""
    machine.sh(
        f"sed -i 's/^answer_after = .*/answer_after = {seconds}/' {POLICY} && systemctl "
        "restart silodp-gate"
    )


def test_silos_come_and_go_certificates_are_renewed_and_a_gate_moves_under_a_running_federation(
    deployed,
):
    """All changes are made while one run goes on, which is then killed, resumed and finished."""
    if deployed.engine != "nvflare":
        pytest.skip("one engine will do: what a run sees of Flower's is in tests/wire")
    server, old, south = deployed.server, deployed.silos["north"], deployed.silos["south"]
    step = {
        number: script for number, who, script in [*blocks(""), *blocks("nvflare")] if who == "silo"
    }
    new, west = deployed.another("gate2", 4), deployed.another("west", 5)
    for machine in (new, west):
        machine.sh(step[2])
    for machine in (old, south):
        paced(machine, 1.0)
    given = status(old)["answered"]
    run = f"{AS_SERVER} {RUNS} --card north.json --card south.json --out second"
    server.sh(f"({run} --rounds {ROUNDS}) > /root/second.log 2>&1 &")

    def goes_on(machine):
        before = status(machine)["answered"]
        deployed.wait(lambda: status(machine)["answered"] > before)
        server.sh(RUNNING)

    goes_on(old)

    server.sh(f"{AS_SERVER} federation renew fed && systemctl restart silodp-server")
    old.write("/root/north.crt", server.read("/var/lib/silodp-server/fed/renewed/north.crt"))
    old.sh(
        "install -o silodp-courier -g silodp-courier -m 0600 north.crt "
        "/var/lib/silodp-courier/site/startup/client.crt"
    )
    old.sh("systemctl restart silodp-courier")
    deployed.await_silos()
    goes_on(old)
    goes_on(south)

    arrival = new.sh("silodp ledger expect arrival.key").split()[-1]
    old.sh(
        f"{AS_GATE} ledger bury {LEDGER} --arrival {arrival} --key "
        "/var/lib/silodp-gate/silo/silo.key --to gate2"
    )
    old.sh("systemctl stop silodp-courier silodp-gate silodp-metrics")
    for folder in ("/var/lib/silodp-gate", "/var/lib/silodp-courier", "/etc/silodp"):
        carry(old, folder, new, folder)
    new.sh("install -o silodp-gate -g silodp-gate -m 0600 arrival.key /var/lib/silodp-gate/")
    new.sh(
        f"{AS_GATE} ledger arrive {LEDGER} --key /var/lib/silodp-gate/arrival.key && "
        "systemctl enable --now silodp-gate silodp-courier silodp-metrics"
    )
    deployed.silos["north"] = new
    deployed.await_silos()
    assert "tombstone" in old.sh(f"{AS_GATE} silo serve {POLICY}", check=False), (
        "the old gate answers nothing any more"
    )
    goes_on(new)

    server.sh(f"{AS_SERVER} federation remove fed south")
    for number in (3, 4):
        west.sh(step[number].replace("KEY", deployed.key).replace("north", "west"))
    server.sh(f"{AS_SERVER} federation add fed west")
    carry(server, "/var/lib/silodp-server/fed/kits/west", west, "/root/kit")
    west.sh(step[7])
    deployed.await_silos({"north", "west"})
    goes_on(new)

    server.sh(f"kill -KILL $({RUNNING})")
    deployed.wait(lambda: not server.sh(RUNNING, check=False).strip())
    paced(new, 0.0)
    said = server.sh(f"{run} --resume")
    assert (
        json.loads(server.read("/var/lib/silodp-server/second/summary.json"))["ended"] == "finished"
    ), said
    assert "removed 1" in said, said
    server.write(
        "/var/lib/silodp-server/west.json", west.read("/var/lib/silodp-gate/silo/silo.json")
    )
    server.sh(f"{AS_SERVER} {RUNS} --card north.json --card west.json --rounds 3 --out third")
    for machine, least, most in (
        (new, given + 8, given + ROUNDS + 3),
        (south, given + 3, given + ROUNDS),
        (west, 3, 3),
    ):
        machine.sh(f"{AS_GATE} ledger verify {LEDGER}")
        assert least <= status(machine)["answered"] <= most, machine.name
    west.sh("systemctl stop silodp-courier silodp-gate")
