"""Other users get what permissions say, no more; without allow_other they get nothing."""

import itertools
import os
from collections.abc import Iterator
from functools import partial

import pytest

from tests.mount.harness import Volume
from tests.mount.posix_checks import (
    OTHER,
    ROOT,
    USER,
    Ground,
    as_user,
    check,
    fails,
    in_child,
    opens,
    outcome,
    read,
    write,
)

MODES = (0o000, 0o400, 0o600, 0o640, 0o604, 0o666, 0o060, 0o006, 0o755, 0o711, 0o070, 0o007)
PEOPLE = ((0, 0, ()), (USER, USER, ()), (OTHER, OTHER, ()), (OTHER, USER, ()), (7, 7, (USER,)))


def _uses(path: str) -> list[object]:
    return [
        opens(path, os.O_RDONLY),
        opens(path, os.O_WRONLY),
        opens(path, os.O_RDWR | os.O_APPEND),
        [os.access(path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK)],
        fails(os.truncate, path, 5),
        fails(os.utime, path, None),
        fails(os.utime, path, ns=(1, 2)),
        fails(os.getxattr, path, "user.x"),
        fails(os.setxattr, path, "user.x", b""),
        fails(os.execv, path, [path]),
    ]


@check(root=True)
def test_permissions_of_files() -> Iterator[object]:
    for number, mode in enumerate(MODES):
        path = f"f{number}"
        write(path, b"no program")
        os.chown(path, USER, USER)
        os.chmod(path, mode)
        for uid, gid, groups in PEOPLE:
            yield oct(mode), uid, gid, as_user(uid, partial(_uses, path), gid=gid, groups=groups)


def _uses_of_directory() -> list[object]:
    seen: list[object] = []
    for make, take_back in (
        (partial(write, "d/new"), partial(os.unlink, "d/new")),
        (partial(os.mkdir, "d/new"), partial(os.rmdir, "d/new")),
        (partial(os.symlink, "x", "d/new"), partial(os.unlink, "d/new")),
        (partial(os.mkfifo, "d/new"), partial(os.unlink, "d/new")),
        (partial(os.link, "mine", "d/new"), partial(os.unlink, "d/new")),
        (partial(os.rename, "mine", "d/new"), partial(os.rename, "d/new", "mine")),
        (partial(os.rename, "d/f", "d/g"), partial(os.rename, "d/g", "d/f")),
        (partial(os.rmdir, "d/sub"), partial(os.mkdir, "d/sub")),
    ):
        seen.append(fails(make))
        if seen[-1] is None:
            take_back()
    return [
        *seen,
        outcome(lambda: sorted(os.listdir("d"))),
        opens("d/f", os.O_RDONLY),
        fails(os.stat, "d/f"),
        fails(os.stat, "d/none"),
        fails(os.chdir, "d"),
    ]


@check(root=True)
def test_permissions_of_directories() -> Iterator[object]:
    os.chmod(".", 0o777)
    for mode, (uid, gid, groups) in itertools.product(MODES, PEOPLE):
        os.mkdir("d")
        os.mkdir("d/sub")
        write("d/f")
        write("mine")
        os.chown("mine", uid, gid)
        for path in ("d", "d/sub", "d/f"):
            os.chown(path, USER, USER)
        os.chmod("d", mode)
        seen = as_user(uid, _uses_of_directory, gid=gid, groups=groups)
        yield oct(mode), uid, gid, seen, os.stat("d").st_nlink
        os.unlink("mine")
        os.unlink("d/f")
        os.rmdir("d/sub")
        os.rmdir("d")


@check(root=True)
def test_sticky_directories() -> Iterator[object]:
    for owner in (0, USER):
        for uid in (USER, OTHER):
            os.mkdir("d")
            os.chown("d", owner, owner)
            os.chmod("d", 0o1777)
            for name, who in (("theirs", 7), ("own", uid)):
                write(f"d/{name}")
                os.mkdir(f"d/{name}-d")
                for path in (f"d/{name}", f"d/{name}-d"):
                    os.chown(path, who, who)
                    os.chmod(path, 0o777)

            def tries() -> list[object]:
                return [
                    fails(os.rename, "d/theirs", "d/x"),
                    fails(os.rename, "d/own", "d/theirs"),
                    fails(os.rename, "d/own", "d/x"),
                    fails(os.unlink, "d/theirs"),
                    fails(os.rmdir, "d/theirs-d"),
                    fails(os.unlink, "d/x"),
                    fails(os.rmdir, "d/own-d"),
                ]

            yield owner, uid, as_user(uid, tries), sorted(os.listdir("d"))
            for name in os.listdir("d"):
                (os.rmdir if os.path.isdir(f"d/{name}") else os.unlink)(f"d/{name}")
            os.rmdir("d")


@check(root=True)
def test_who_may_change_attributes() -> Iterator[object]:
    for uid, gid, groups in PEOPLE[1:]:
        write("f")
        os.chown("f", USER, USER)
        os.chmod("f", 0o777)

        def tries() -> list[object]:
            return [
                fails(os.chmod, "f", 0o700),
                fails(os.chmod, "f", 0o7755),
                oct(os.stat("f").st_mode),
                fails(os.chown, "f", OTHER, -1),
                fails(os.chown, "f", -1, OTHER),
                fails(os.chown, "f", -1, USER),
                fails(os.chown, "f", USER, -1),
                fails(os.chown, "f", -1, 7),
                fails(os.mknod, "device", 0o020666, os.makedev(1, 3)),
                fails(os.chroot, "."),
            ]

        yield uid, gid, as_user(uid, tries, gid=gid, groups=groups), os.stat("f").st_gid
        os.unlink("f")


@check(root=True)
def test_owners_of_what_is_made() -> Iterator[object]:
    os.chmod(".", 0o777)

    def make() -> None:
        write("f")
        os.mkdir("d")
        os.symlink("x", "l")
        os.mkfifo("p")
        os.link("f", "h")

    as_user(USER, make, gid=OTHER, groups=[7])
    for name in "fdlph":
        yield os.lstat(name).st_uid, os.lstat(name).st_gid


@check(root=True)
def test_an_open_file_stays_open_whoever_reads_it() -> Iterator[object]:
    write("f", b"opened by root")
    os.chmod("f", 0o600)
    fd = os.open("f", os.O_RDWR)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    yield as_user(USER, lambda: [os.read(fd, 100), os.pwrite(fd, b"O", 0), opens("f", os.O_RDONLY)])
    yield read("f")


def _others_are_shut_out() -> Iterator[object]:
    write("f", b"x")
    os.chmod("f", 0o777)
    fd = os.open("f", os.O_RDONLY)

    def tries() -> list[object]:
        return [
            fails(os.stat, "f"),
            fails(os.listdir, "."),
            opens("f", os.O_RDONLY),
            opens("new", os.O_CREAT | os.O_WRONLY),
            fails(os.stat, ".."),
            fails(os.setxattr, "f", "user.a", b""),
            fails(os.statvfs, "."),
            fails(os.chdir, "."),
        ]

    # A program that the mount's owner runs with another effective or saved user is shut out too.
    def changed() -> object:
        os.setresuid(0, USER, 0)
        return fails(os.stat, "f")

    os.chmod(".", 0o777)
    for uid in (USER, OTHER):
        seen = as_user(uid, tries)
        # statfs tells what is mounted where, as the kernel does for every FUSE mount.
        assert set(seen[:6] + seen[7:]) == {"EACCES"}, seen
    assert in_child(changed) == "EACCES"
    assert in_child(tries)[0] is None
    assert os.read(fd, 1) == b"x"
    yield "right"


@pytest.mark.skipif(not ROOT, reason="becomes other users")
def test_without_allow_other_nobody_else_gets_in(volume: Volume) -> None:
    with volume.mounted():
        Ground(volume.point, None).run(_others_are_shut_out)
