"""Machines for a deployment, on this one: each has a network of its own, users, folders and
processes of its own, and this machine's programs.

A machine is a network namespace at a bridge, and an init process with a file system that is a layer
over this machine's: what is written there is gone with it. Init is systemd itself where there is
systemd-nspawn to boot it, so that units run under it with all that they ask for; elsewhere, or with
SILODP_STAND_IN set, a small stand-in (`systemctl.py`). It needs root, and a kernel that gives
namespaces and overlays; `why_not` says what is missing.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

HERE = Path(__file__).parent
INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
print("ready", flush=True)
while True:
    signal.sigwait({signal.SIGCHLD})
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
FRESH = ("/var/lib", "/srv", "/mnt", "/opt")
LAYER = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
cd "$1" && mkdir up work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" root
"""
SETUP = f"""{LAYER}
mount -t proc proc root/proc
mount --rbind /dev root/dev
for place in run {" ".join(place[1:] for place in FRESH)}; do mount -t tmpfs -o mode=755 tmpfs "root/$place"; done
mount -t tmpfs -o mode=1777 tmpfs root/tmp
ip link set lo up
exec chroot root "$2" -c "$3"
"""  # noqa: E501
PYTHON = "/usr/local/python"
"""Where a machine with systemd has this Python, whose library it then finds by LD_LIBRARY_PATH: a
unit may not see /root, below which it may lie.
"""
BOOT = f"""{LAYER}
rm -rf root/etc/systemd/system/*.wants root/etc/machine-id root/etc/resolv.conf
mkdir -p root/etc/systemd/system.conf.d root{PYTHON}
echo uninitialized > root/etc/machine-id
printf '[Manager]\\nDefaultEnvironment=OMP_NUM_THREADS=1 LD_LIBRARY_PATH={PYTHON}/lib\\n' > root/etc/systemd/system.conf.d/test.conf
exec systemd-nspawn --quiet --directory=root --boot --register=no --keep-unit --resolv-conf=off --timezone=off --link-journal=no --capability=all \
    --machine="$2" --network-namespace-path="/run/netns/$3" --bind-ro="$4:{PYTHON}" {" ".join(f"--tmpfs={place}:mode=755" for place in FRESH)} \
    systemd.unit=basic.target
"""  # noqa: E501
SYSTEMD = bool(shutil.which("systemd-nspawn")) and "SILODP_STAND_IN" not in os.environ


def run(*words, **how):
    done = subprocess.run(words, capture_output=True, text=True, check=False, **how)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@functools.cache
def why_not() -> str:
    """Why this machine cannot stand for several; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := [
        tool
        for tool in ("ip", "unshare", "nsenter", "useradd", "runuser")
        if not shutil.which(tool)
    ]:
        return f"needs {missing[0]}"
    try:
        with Network("why") as network:
            network.machine("tried", "10.98.7.1").sh("true")
    except (AssertionError, OSError) as error:
        return (
            "this machine gives no namespaces: "
            f"{str(error).strip().splitlines()[-1] if str(error).strip() else error}"
        )
    return ""


class Network:
    """A bridge with nothing on it but the machines that are made here; at the end they are gone,
    whatever happened.
    """

    def __init__(self, word: str) -> None:
        self._bridge, self._machines = f"sb{word[:4]}{os.getpid() % 100000}", []

    def __enter__(self):
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "link", "set", self._bridge, "up")
        return self

    def machine(self, name: str, address: str, hosts: str = "") -> "Machine":
        machine = Machine(name, f"{self._bridge[2:]}{len(self._machines)}", hosts)
        self._machines.append(machine)
        machine.start(self._bridge, address)
        return machine

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.end()
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)


class Machine:
    """One machine; `sh` runs a script there as root."""

    def __init__(self, name: str, word: str, hosts: str) -> None:
        self.name, self._net, self._hosts = name, f"sn{word}", hosts
        self._top = tempfile.mkdtemp(prefix="machine")
        self._init: subprocess.Popen | None = None
        self.pid = 0

    def start(self, bridge: str, address: str) -> None:
        run("ip", "netns", "add", self._net)
        end = f"sv{self._net[2:]}"[:15]
        run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", self._net)
        run("ip", "link", "set", end, "master", bridge, "up")
        run("ip", "-n", self._net, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", self._net, "link", "set", "eth0", "up")
        (self._boot if SYSTEMD else self._stand_in)()
        self.write("/etc/hosts", f"127.0.0.1 localhost\n{self._hosts}")
        software = {Path(sys.base_prefix), Path(sys.prefix), HERE}
        self.sh(
            "\n".join(
                f"chmod o+x {folder}"
                for path in software
                for folder in path.parents
                if folder != folder.parent
            )
        )
        if not SYSTEMD:
            program = (
                f"#!{os.path.realpath(sys.executable)}\n" + (HERE / "systemctl.py").read_text()
            )
            self.write("/usr/local/bin/systemctl", program, mode=0o755)

    def _boot(self) -> None:
        """Until systemd has reached its basic target."""
        words = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            BOOT,
            "sh",
            self._top,
            self._net,
            self._net,
            sys.base_prefix,
        ]
        self._init = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while not self.pid or "basic.target" not in self.sh(
            "systemctl is-active --quiet basic.target && echo basic.target", check=False
        ):
            assert self._init.poll() is None, f"{self.name} did not start"
            assert time.monotonic() < deadline, f"{self.name} does not come up"
            time.sleep(0.2)
            found = subprocess.run(
                ["pgrep", "-P", str(self._init.pid)], capture_output=True, text=True, check=False
            ).stdout.split()
            self.pid = int(found[0]) if found and _name(int(found[0])) == "systemd" else 0

    def _stand_in(self) -> None:
        words = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--uts",
            "sh",
            "-c",
            SETUP,
            "sh",
            self._top,
        ]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self._net, *words, os.path.realpath(sys.executable), INIT],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "ready\n", f"{self.name} did not start"
        (unshare,) = (
            run("pgrep", "-P", str(self._init.pid)).split()
            if _name(self._init.pid) != "unshare"
            else [str(self._init.pid)]
        )
        self.pid = int(run("pgrep", "-P", unshare).split()[0])

    def sh(
        self, script: str, *, check: bool = True, within: str = "/root", timeout: float = 900.0
    ) -> str:
        """What the script prints; with `check` its exit code must be 0. PATH is that of a login,
        with this Python's own folder first.
        """
        path = f"{PYTHON if SYSTEMD else sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # noqa: E501
        environment = {
            "PATH": path,
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        } | PIP
        done = subprocess.run(
            [
                *self._enter,
                f"--wd={self.root}{within}",
                "bash",
                "-euo",
                "pipefail",
                "-c",
                textwrap.dedent(script),
            ],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        said = done.stdout + done.stderr
        assert not check or done.returncode == 0, (
            f"at {self.name}, {script}\nended with {done.returncode}:\n{said}"
        )
        return said

    @property
    def _enter(self) -> list[str]:
        return [
            "nsenter",
            "--target",
            str(self.pid),
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--root",
        ]

    @property
    def root(self) -> str:
        return f"/proc/{self.pid}/root"

    def read(self, path: str) -> bytes:
        return Path(self.root + path).read_bytes()

    def write(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        place = Path(self.root + path)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
        place.chmod(mode)

    def main_process(self, unit: str) -> int:
        return int(self.sh(f"systemctl show --property MainPID --value {unit}"))

    def logs(self) -> str:
        return self.sh(
            "journalctl --no-pager --lines 60" if SYSTEMD else "tail -n 30 /run/units/*.log",
            check=False,
        )

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._init:
            self._init.kill()
            self._init.wait()
            if self._init.stdout is not None:
                self._init.stdout.close()
        subprocess.run(["ip", "netns", "del", self._net], check=False, capture_output=True)
        shutil.rmtree(self._top, ignore_errors=True)


PIP = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_DEPS": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_FIND_LINKS": "/root",
}
"""`pip install silodp` finds the wheel in /root, and asks nobody else."""


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
