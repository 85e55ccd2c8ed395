"""Check that no other user can change or read what a daemon uses.

The check looks at owner and mode of a file, and of every folder and link on the way to it. What a
daemon reads decides what it does: a policy names code, an anchor records what was spent. So only
root and the daemon's own user may be able to replace such a file.

Each step of a path, links followed one by one, must belong to one of the two. No other user may be
able to write to it. A sticky folder that all may write to, such as /tmp, may be passed through to a
folder of ours. No other user can take away that folder's name. Nothing is read or made in the
sticky folder itself, since any user could leave a journal or a pause there.

There is no race between this check and the use of a path. Only root and this user can change the
meaning of a path whose steps all passed. The check does not see what a file server allows, nor who
may write where the software itself is installed.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from silodp.core.errors import BadInput

LINKS = 40
"""Most links that one path may pass through, as in Linux."""


def group_of(name: str) -> int:
    """Return the number of the group that may open a socket. "" means the process's own group.

    Raise BadInput if there is no such group.
    """
    try:
        if name.isdigit():
            return int(name)
        if name:
            return grp.getgrnam(name).gr_gid
        return os.getegid()
    except KeyError:
        raise BadInput(
            f"socket_group is {name!r}; it must be a group of this machine, or its number"
        ) from None


def users_of(names: Iterable[str]) -> set[int]:
    """Return the numbers of the users that may connect to a socket.

    Raise BadInput if one of them does not exist.
    """
    numbers = set()
    for name in names:
        if name.isdigit():
            numbers.add(int(name))
            continue
        try:
            numbers.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise BadInput(
                f"couriers is {list(names)}; each must be a user of this machine, or a number"
            ) from None
    return numbers


def exposed(path: str, group: int) -> str | None:
    """Return a sentence if other users could open the file, or None.

    Those are all users, the group that may open the socket, and users on an access list.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o7 or (mode & 0o70 and (status.st_gid == group or _listed(path))):
        return (
            f"{path} has mode {mode:04o}, so that the courier's user could open it; use chmod "
            "go-rwx, or another group"
        )
    return None


def reachable(path: str, group: int) -> bool:
    """Return whether a user of the socket's group, or any other, could reach the file's name.

    Such a user could read the file's times, if not its content.
    """
    folders = [status for _, status in _steps(path) if stat.S_ISDIR(status.st_mode)]
    return all(
        folder.st_mode & 0o1 or (folder.st_mode & 0o10 and folder.st_gid == group)
        for folder in folders
    )


# --- who else could change it --------------------------------------------------------------------


def entrust(paths: Iterable[str | Path | None]) -> None:
    """Raise BadInput if another user could change what one of the paths is.

    For a folder this includes what it contains. None and "" are no paths.
    """
    for path in paths:
        if path and (sentence := changeable(path)):
            raise BadInput(sentence)


def changeable(path: str | Path) -> str | None:
    """Return a sentence if a user other than root and this one could replace the path, or None.

    The path need not exist yet.
    """
    shared = ""  # the sticky folder that was the previous step
    try:
        for step, status in _steps(path):
            if wrong := _not_ours(step, status):
                return _sentence(wrong, step, path)
            is_folder = stat.S_ISDIR(status.st_mode)
            if shared and not is_folder:
                return _shared(shared)
            shared = ""
            if _others_write(step, status):
                if not (is_folder and status.st_mode & stat.S_ISVTX):
                    return _sentence(_too_open(step, status), step, path)
                shared = step
        if shared:
            return _shared(shared)
        if os.path.isdir(path):
            return _within(path)
        return None
    except OSError as error:
        return (
            f"who may change {path} cannot be found out ({error.strerror}); every folder on the "
            "way must be open to the daemon's user"
        )


def _steps(path: str | Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every folder, link and file on the way from the root, with its status.

    It follows links as the system does, and ends at the first name that does not exist.
    """
    ahead = [*reversed(Path(os.getcwd(), path).parts[1:])]
    here = "/"
    links = 0
    yield here, os.lstat(here)
    while ahead:
        if (name := ahead.pop()) == "..":
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        try:
            status = os.lstat(step)
        except FileNotFoundError:
            return
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > LINKS:
            raise OSError(0, "too many links")
        target = Path(os.readlink(step))
        parts = target.parts
        if target.is_absolute():
            here = "/"
            parts = parts[1:]
        ahead += reversed(parts)


def _within(path: str | Path) -> str | None:
    """Return a sentence if another user could replace anything in the folder, or None."""
    for place, folders, files in os.walk(path, onerror=_raise):
        for entry in (os.path.join(place, name) for name in (*folders, *files)):
            status = os.lstat(entry)
            if stat.S_ISLNK(status.st_mode):
                wrong = changeable(entry)
            else:
                wrong = _not_ours(entry, status)
            if wrong:
                return wrong
            if _others_write(entry, status):
                return _too_open(entry, status)
    return None


def _raise(error: OSError) -> None:
    raise error


def _not_ours(step: str, status: os.stat_result) -> str:
    if status.st_uid in (0, os.geteuid()):
        inherited = stat.S_ISDIR(status.st_mode) and _listed(step, "default")
        if inherited:
            return (
                f"{step} has a default access list, which would give other users access to new "
                "files in it; use setfacl -k"
            )
        return ""
    return (
        f"{step} belongs to {_name(status.st_uid)}; it must belong to root or to "
        f"{_name(os.geteuid())}, the user that serves: use chown"
    )


def _others_write(step: str, status: os.stat_result) -> bool:
    """Return whether another user may write to this step of a path.

    A link has no mode of its own, and writing to a socket only connects to it. With an access list,
    the group's bits are the most that the list permits.
    """
    if stat.S_ISLNK(status.st_mode) or stat.S_ISSOCK(status.st_mode):
        return False
    mode = status.st_mode
    return bool(mode & 0o2 or (mode & 0o20 and (_listed(step) or not _alone_in(status.st_gid))))


def _too_open(step: str, status: os.stat_result) -> str:
    sentence = (
        f"{step} has mode {stat.S_IMODE(status.st_mode):04o}, so that another user could write "
        "it; use chmod go-w"
    )
    if _listed(step):
        return f"{sentence}, and setfacl -b, for it has an access list"
    return sentence


def _shared(folder: str) -> str:
    return (
        f"{folder} is a folder that every user may write to; keep a daemon's files in a folder "
        "of their own below it, with mode 0700"
    )


def _sentence(wrong: str, step: str, path: str | Path) -> str:
    if step == str(path):
        return wrong
    return f"{wrong} (it is on the way to {path})"


def _name(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"the user {pwd.getpwuid(user).pw_name}"
    return f"user {user}"


def _listed(path: str, kind: str = "access") -> bool:
    """Return whether the file has a POSIX access list in addition to its mode.

    With "default": whether a folder has such a list for new files in it.
    """
    with contextlib.suppress(OSError):
        return f"system.posix_acl_{kind}" in os.listxattr(path)
    return False


@functools.cache
def _alone_in(group: int) -> bool:
    """Return whether this user is the only member of the group, which is the user's own.

    Many systems make such groups. A group's right to write then gives nothing to others.
    """
    try:
        own = pwd.getpwuid(os.geteuid())
        members = grp.getgrgid(group).gr_mem
    except KeyError:
        return False
    others = [
        user.pw_name
        for user in pwd.getpwall()
        if user.pw_gid == group and user.pw_uid != own.pw_uid
    ]
    return group == own.pw_gid and not others and set(members) <= {own.pw_name}
