"""Nothing but the daemons needs Linux: everything else loads and trains without what only Unix has.
Windows itself is not tried.
"""

import os
import subprocess
import sys
import textwrap

WITHOUT = """
import os, socket, sys, types
for name in ("fcntl", "pwd", "grp", "resource", "termios", "syslog"):
    sys.modules[name] = None
for place, names in ((os, ("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "getuid", "geteuid", "getegid", "sched_getaffinity")),
                     (socket, ("AF_UNIX", "SO_PEERCRED"))):
    for name in names:
        if hasattr(place, name):
            delattr(place, name)
"""  # noqa: E501
DAEMONS = {
    "silodp.host.daemon",
    "silodp.host.listener",
    "silodp.host.ownership",
    "silodp.shuffler.daemon",
    "silodp.silo.personal",
    "silodp.silo.service.daemon",
    "silodp.silo.service.page",
    "silodp.silo.service.pause",
}
"""What serves a gate or a shuffler, or looks after the files of one."""


def run(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", WITHOUT + textwrap.dedent(code)]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_but_those_of_daemons_loads_without_what_only_unix_has():
    failed = run("""
        import importlib, pkgutil, silodp
        for module in pkgutil.walk_packages(silodp.__path__, "silodp.", onerror=lambda name: None):
            if module.name.endswith("__main__") or module.name.startswith(("silodp.wire.nvflare", "silodp.wire.flower")):
                continue
            try:
                importlib.import_module(module.name)
            except (ImportError, AttributeError):
                print(module.name)
    """)  # noqa: E501
    assert set(failed.split()) == DAEMONS


def test_a_training_and_its_private_test_run_with_the_locks_of_windows(tmp_path):
    """By a stand-in for Windows's module, which can only say that a lock is taken, or is not."""
    said = run(
        """
        calls = []
        def locking(handle, kind, count):
            calls.append(os.lseek(handle, 0, os.SEEK_CUR))
            if busy:
                raise OSError("locked")
        busy = False
        import silodp
        from silodp.host.portable import lock
        frames = {name: frame[["age", "systolic", "readmitted"]].dropna() for name, frame in silodp.hospitals().items() if name != "north"}
        trainer = silodp.train  # all libraries are loaded: some take msvcrt for Windows itself
        sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
        settings = {"model": "logistic", "algorithm": "mb-sgd", "rounds": 3, "ranges": {"age": (18, 100), "systolic": (80, 220)}}
        made = trainer(frames, label="readmitted", classes=["no", "yes"], held_out=0.2, epsilon=2, seed=0, **settings)
        print(len(made.evaluate(2)), (made.spent["in_all"] > 2).all(), len(calls) > 2, set(calls) == {2**40})
        busy = True
        with open(os.path.join(os.environ["SILODP_STATE"], "held"), "w+b") as file:
            print(lock(file), file.tell())
        """,  # noqa: E501
        SILODP_STATE=str(tmp_path),
        SILODP_NATIVE="0",  # no compiler, either
    )
    assert said.split() == ["13", "True", "True", "True", "False", "0"]
