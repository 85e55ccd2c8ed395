"""Who else could change or read what a daemon uses: owner and mode of a file, and of every folder
and link on the way to it.

What a daemon reads decides what it does: a policy names code, an anchor says what was spent. So
nobody but root and the daemon's own user may be able to put something else in its place. Each step
of a path, links followed one by one, must belong to one of the two and be writable by nobody else.
A folder that all may write but that is sticky, such as /tmp, may be passed through to a folder of
ours, whose name nobody else can take away; nothing is read or made in it, since anybody could leave
a journal or a pause beside it.

Between this check and the use of a path there is no race: only root and this user can change what a
path means all of whose steps passed. It does not see what a file server allows, nor who may write
where the software itself lies.
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
"""Links on one way, at most, as in Linux."""


def group_of(name: str) -> int:
    """The number of the group that may open a socket; "" is the process's own."""
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
    """The numbers of users that may knock at a socket."""
    try:
        return {int(name) if name.isdigit() else pwd.getpwnam(name).pw_uid for name in names}
    except KeyError:
        raise BadInput(
            f"couriers is {list(names)}; each must be a user of this machine, or a number"
        ) from None


def exposed(path: str, group: int) -> str | None:
    """A sentence if the file may be opened by everybody, by the group that may open the socket, or
    by somebody on an access list.
    """
    try:
        found = os.stat(path)
    except OSError:
        return None
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o7 or (mode & 0o70 and (found.st_gid == group or _listed(path))):
        return (
            f"{path} has mode {mode:04o}, so that the courier's user could open it; use chmod "
            "go-rwx, or another group"
        )
    return None


def reachable(path: str, group: int) -> bool:
    """Whether a user of the socket's group, or any other, could come to the file's name, and so
    read its times if not its content.
    """
    folders = [found for _, found in _steps(path) if stat.S_ISDIR(found.st_mode)]
    return all(
        found.st_mode & 0o1 or (found.st_mode & 0o10 and found.st_gid == group) for found in folders
    )


# --- who else could change it --------------------------------------------------------------------


def entrust(paths: Iterable[str | Path | None]) -> None:
    """Raises BadInput if another user could change what one of the paths is; of a folder, also what
    lies in it. None and "" are no paths.
    """
    for path in paths:
        if path and (sentence := changeable(path)):
            raise BadInput(sentence)


def changeable(path: str | Path) -> str | None:
    """A sentence if anybody but root and this user could put something else in the path's place;
    nothing need be there yet.
    """
    shared = ""  # the sticky folder that was just passed
    try:
        for step, found in _steps(path):
            if wrong := _not_ours(step, found):
                return _sentence(wrong, step, path)
            if shared and not stat.S_ISDIR(found.st_mode):
                return _shared(shared)
            shared = step if _others_write(step, found) else ""
            if shared and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
                return _sentence(_too_open(step, found), step, path)
        if shared:
            return _shared(shared)
        if os.path.isdir(path):
            return _within(path)
        return None
    except OSError as error:
        return (
            f"who may change {path} cannot be seen ({error.strerror}); every folder on the way "
            "must be open to the daemon's user"
        )


def _steps(path: str | Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder, link and file on the way from the root, as the system itself goes; ends where
    nothing is yet.
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
            found = os.lstat(step)
        except FileNotFoundError:
            return
        yield step, found
        if not stat.S_ISLNK(found.st_mode):
            here = step
        elif (links := links + 1) > LINKS:
            raise OSError(0, "too many links")
        else:
            target = Path(os.readlink(step))
            here = "/" if target.is_absolute() else here
            ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _within(path: str | Path) -> str | None:
    """The same of all that lies in a folder."""
    for place, folders, files in os.walk(path, onerror=_raise):
        for entry in (os.path.join(place, name) for name in (*folders, *files)):
            found = os.lstat(entry)
            if (
                wrong := changeable(entry)
                if stat.S_ISLNK(found.st_mode)
                else _not_ours(entry, found)
            ):
                return wrong
            if _others_write(entry, found):
                return _too_open(entry, found)
    return None


def _raise(error: OSError) -> None:
    raise error


def _not_ours(step: str, found: os.stat_result) -> str:
    if found.st_uid in (0, os.geteuid()):
        inherited = stat.S_ISDIR(found.st_mode) and _listed(step, "default")
        if inherited:
            return (
                f"{step} has a default access list, which would let other users at what is "
                "made in it; use setfacl -k"
            )
        return ""
    return (
        f"{step} belongs to {_name(found.st_uid)}; it must belong to root or to "
        f"{_name(os.geteuid())}, the user that serves: use chown"
    )


def _others_write(step: str, found: os.stat_result) -> bool:
    """A link has no mode of its own, and to write to a socket is to knock. With an access list the
    group's bits are the most that it gives.
    """
    if stat.S_ISLNK(found.st_mode) or stat.S_ISSOCK(found.st_mode):
        mode = 0
    else:
        mode = found.st_mode
    return bool(mode & 0o2 or (mode & 0o20 and (_listed(step) or not _alone_in(found.st_gid))))


def _too_open(step: str, found: os.stat_result) -> str:
    if _listed(step):
        list_of_its_own = ", and setfacl -b, for it has an access list"
    else:
        list_of_its_own = ""
    return (
        f"{step} has mode {stat.S_IMODE(found.st_mode):04o}, so that another user could write "
        f"it; use chmod go-w{list_of_its_own}"
    )


def _shared(folder: str) -> str:
    return (
        f"{folder} is a folder that everybody may write; keep nothing of a daemon in it but in "
        "a folder of its own, with mode 0700"
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
    """Whether the file has a POSIX access list beside its mode; by "default", a folder one for what
    is made in it.
    """
    with contextlib.suppress(OSError):
        return f"system.posix_acl_{kind}" in os.listxattr(path)
    return False


@functools.cache
def _alone_in(group: int) -> bool:
    """Whether the group is this user's own and has nobody else in it, as many systems make them:
    its right to write is then nobody's.
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
