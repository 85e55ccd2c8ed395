"""Stands for systemd's systemctl on a machine without it: reads the very units, and gives their
processes user, groups, folders, environment, a file system of which all but the unit's own folders
is read-only, and no network where the unit says so. Filters of system calls it leaves out.

Standard library only: it runs as a program of the machine.
"""

import contextlib
import ctypes
import grp
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

UNITS, PIDS = Path("/etc/systemd/system"), Path("/run/units")
LIBC = ctypes.CDLL(None, use_errno=True)
BIND, REC, PRIVATE, REMOUNT, RDONLY = 0x1000, 0x4000, 0x40000, 0x20, 0x1


def settings(name):
    """Every setting of the unit, with all its values."""
    found = {}
    text = (UNITS / f"{name}.service").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign and not line.startswith(("#", ";")):
            found.setdefault(key, []).append(value)
    return found


def mount(source, target, flags):
    if LIBC.mount(source.encode(), target.encode(), None, flags, None):
        raise OSError(ctypes.get_errno(), target)


def confine(unit, folders):
    """ProtectSystem=strict: all that is mounted becomes read-only but /dev, /proc, /sys, the unit's
    own folders and its private /tmp.
    """
    mount("none", "/", REC | PRIVATE)
    for hidden in " ".join(unit.get("InaccessiblePaths", [])).split():
        if os.path.isdir(hidden.lstrip("-")):
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "mode=000,ro", "tmpfs", hidden.lstrip("-")],
                check=True,
            )
    if unit.get("PrivateTmp") == ["true"]:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/tmp"], check=True)
    if unit.get("ProtectSystem") != ["strict"]:
        return
    own = [str(folder) for folder in folders] + ["/tmp"]
    for path in " ".join(unit.get("ReadWritePaths", [])).split():
        if os.path.exists(path.lstrip("-")):
            own.append(path.lstrip("-"))
        elif not path.startswith("-"):
            raise FileNotFoundError(path)
    for path in own:
        mount(path, path, BIND | REC)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        place = line.split()[1].encode().decode("unicode_escape")
        if not any(
            place == kept or place.startswith(f"{kept}/")
            for kept in (*own, "/dev", "/proc", "/sys")
        ):
            with contextlib.suppress(OSError):
                mount("none", place, BIND | REMOUNT | RDONLY)
    try:
        Path("/etc/written").touch()
    except OSError:
        return
    raise SystemExit("the machine is not read-only")


def begin(name):
    """In a mount namespace of its own: becomes what the unit says."""
    unit = settings(name)
    one = {key: values[-1] for key, values in unit.items()}
    if one.get("DynamicUser") == "true":
        user, group = (
            pwd.struct_passwd(("dynamic", "x", 61184, 61184, "", "/", "")),
            grp.struct_group(("dynamic", "x", 61184, [])),
        )
    else:
        user, group = pwd.getpwnam(one["User"]), grp.getgrnam(one["Group"])
    folders = []
    for key, top, mode in (
        ("StateDirectory", "/var/lib", "StateDirectoryMode"),
        ("RuntimeDirectory", "/run", "RuntimeDirectoryMode"),
    ):
        for word in one.get(key, "").split():
            folders.append(Path(top, word))
            folders[-1].mkdir(exist_ok=True)
            folders[-1].chmod(int(one.get(mode, "755"), 8))
            os.chown(folders[-1], user.pw_uid, group.gr_gid)
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "LANG": "C.UTF-8",
    }
    environment |= dict(
        pair.split("=", 1) for line in unit.get("Environment", []) for pair in shlex.split(line)
    )
    for file in unit.get("EnvironmentFile", []):
        if file.startswith("-") and not os.path.exists(file[1:]):
            continue
        pairs = (
            line.partition("=")
            for line in Path(file.lstrip("-")).read_text().splitlines()
            if "=" in line
        )
        environment |= {key: value for key, _, value in pairs}
    environment |= {"NOTIFY_SOCKET": os.environ["NOTIFY_SOCKET"], "OMP_NUM_THREADS": "1"}
    confine(unit, folders)
    words = []
    for word in shlex.split(one["ExecStart"]):
        if word.startswith("$") and not word.startswith("${"):
            words += environment.get(word[1:], "").split()
        else:
            for key, value in environment.items():
                word = word.replace(f"${{{key}}}", value)
            words.append(word)
    os.setgroups([grp.getgrnam(word).gr_gid for word in one.get("SupplementaryGroups", "").split()])
    os.setgid(group.gr_gid)
    os.setuid(user.pw_uid)
    os.umask(int(one.get("UMask", "0022"), 8))
    os.chdir(one.get("WorkingDirectory", "/"))
    os.execve(words[0], words, environment)


def start(name):
    unit = settings(name)
    PIDS.mkdir(exist_ok=True)
    address = PIDS / f"{name}.notify"
    address.unlink(missing_ok=True)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear,
        open(PIDS / f"{name}.log", "ab") as log,
    ):
        ear.bind(str(address))
        address.chmod(0o666)
        ear.settimeout(0.2)
        words = [
            "unshare",
            "--mount",
            *(["--net"] if unit.get("PrivateNetwork") == ["true"] else []),
            sys.executable,
            __file__,
            "begin",
            name,
        ]
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"NOTIFY_SOCKET": str(address)},
        )
        (PIDS / name).write_text(str(process.pid))
        deadline = time.monotonic() + 300
        while unit["Type"] == ["notify"] and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                if b"READY=1" in ear.recv(4096):
                    return 0
            if process.poll() is not None:
                print((PIDS / f"{name}.log").read_text()[-2000:], file=sys.stderr)
                return 1
    return 0 if unit["Type"] != ["notify"] else 1


def stop(name):
    pid = int((PIDS / name).read_text())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.1)
        os.killpg(pid, signal.SIGKILL)
    return 0


def main(command, *words):
    names = [word.removesuffix(".service") for word in words if not word.startswith("--")]
    if command == "begin":
        return begin(names[0])
    if command == "show":  # the main process alone
        return print((PIDS / names[-1]).read_text())
    if command == "restart":
        return max(max(stop(name), start(name)) for name in names)
    if command == "stop":
        return max(map(stop, names))
    if command == "enable" and "--now" in words:
        return max(map(start, names))
    return 0 if command == "daemon-reload" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
