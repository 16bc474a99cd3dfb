"""Extended attributes and POSIX ACLs."""

import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Iterator

from tests.mount.posix_checks import OTHER, USER, as_user, check, fails, opens, outcome, tick, write

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
TAGS = {"u:": 1, "u": 2, "g:": 4, "g": 8, "m": 16, "o": 32}


def acl(*entries: tuple[str, int] | tuple[str, int, int]) -> bytes:
    """Return an ACL as the kernel takes it, from (tag, permissions[, id])."""
    packed = [
        struct.pack("<HHI", TAGS[tag], perm, rest[0] if rest else 0xFFFFFFFF)
        for tag, perm, *rest in entries
    ]
    return struct.pack("<I", 2) + b"".join(packed)


def setfacl(*args: str) -> tuple[int, str]:
    """Run setfacl; return its exit code and complaint."""
    done = subprocess.run(["setfacl", *args], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def getfacl(*names: str) -> str:
    """Return what getfacl prints."""
    command = ["getfacl", "-n", "-p", *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---- extended attributes ----


@check()
def test_values_and_flags() -> Iterator[object]:
    write("f")
    os.mkdir("d")
    for path in ("f", "d"):
        for name, value in (
            ("user.binary", bytes(range(256))),
            ("user.empty", b""),
            ("user.large", b"\xff" * 3000),
            ("user.\u00e4\u20ac", b"a name in UTF-8"),
            ("user.with space\n", b"x"),
            ("user." + "n" * 250, b"the longest name"),
        ):
            os.setxattr(path, name, value, os.XATTR_CREATE)
            assert os.getxattr(path, name) == value
            yield fails(os.setxattr, path, name, b"again", os.XATTR_CREATE)
            os.setxattr(path, name, value + b"!", os.XATTR_REPLACE)
            os.setxattr(path, name, value)
            assert os.getxattr(path, name) == value
        yield sorted(os.listxattr(path))
        yield fails(os.setxattr, path, "user.none", b"", os.XATTR_REPLACE)
        yield fails(os.setxattr, path, "user.none", b"", 4)
        yield fails(os.getxattr, path, "user.none"), fails(os.removexattr, path, "user.none")
        os.removexattr(path, "user.binary")
        yield sorted(os.listxattr(path))


@check()
def test_names_that_are_refused() -> Iterator[object]:
    write("f")
    os.symlink("f", "l")
    os.mkfifo("p")
    for name in (
        "user.",
        "user",
        "",
        "nothing",
        "other.name",
        "system.name",
        "system.posix_acl",
        "user." + "n" * 251,
        "n" * 300,
    ):
        yield name[:20], fails(os.setxattr, "f", name, b"x"), fails(os.getxattr, "f", name)
        yield fails(os.removexattr, "f", name)
    for path in ("l", "p"):
        yield fails(os.setxattr, path, "user.x", b"x", follow_symlinks=False)
        yield fails(os.getxattr, path, "user.x", follow_symlinks=False)
        yield os.listxattr(path, follow_symlinks=False)


@check()
def test_sizes_of_buffers() -> Iterator[object]:
    libc = ctypes.CDLL(None, use_errno=True)
    write("f")
    os.setxattr("f", "user.a", b"12345")
    os.setxattr("f", "user.b", b"")

    def call(function: str, *args: object) -> object:
        result = getattr(libc, function)(*args)
        return result if result >= 0 else errno.errorcode[ctypes.get_errno()]

    buffer = ctypes.create_string_buffer(100)
    for room in (0, 1, 4, 5, 6, 100):
        yield call("getxattr", b"f", b"user.a", buffer, room)
        yield call("getxattr", b"f", b"user.b", buffer, room)
        yield call("listxattr", b"f", buffer, room)


@check(same=False)
def test_limits() -> Iterator[object]:
    write("f")
    assert fails(os.setxattr, "f", "user.x", bytes(65537)) == "E2BIG"
    os.setxattr("f", "user.x", b"\x5a" * 65536)
    assert os.getxattr("f", "user.x") == b"\x5a" * 65536
    # The names of all together are what listxattr can return.
    made = 0
    while (error := fails(os.setxattr, "f", f"user.{made:0248}", b"v")) is None:
        made += 1
        assert made < 400
    assert error == "ENOSPC" and made > 200
    assert len(os.listxattr("f")) == made + 1
    for number in range(made):
        assert os.getxattr("f", f"user.{number:0248}") == b"v"
        os.removexattr("f", f"user.{number:0248}")
    assert os.listxattr("f") == ["user.x"]
    yield "right"


@check(root=True)
def test_namespaces_of_the_administrator() -> Iterator[object]:
    write("f")
    os.chmod("f", 0o666)
    os.symlink("f", "l")
    os.setxattr("f", "trusted.a", b"t")
    os.setxattr("f", "security.a", b"s")
    os.setxattr("f", "user.a", b"u")
    os.setxattr("l", "trusted.l", b"t", follow_symlinks=False)
    yield sorted(os.listxattr("f")), os.listxattr("l", follow_symlinks=False)

    def ordinary() -> list[object]:
        return [
            sorted(os.listxattr("f")),
            outcome(os.getxattr, "f", "trusted.a"),
            outcome(os.getxattr, "f", "security.a"),
            fails(os.setxattr, "f", "trusted.a", b"x"),
            fails(os.setxattr, "f", "security.a", b"x"),
            fails(os.removexattr, "f", "trusted.a"),
            fails(os.setxattr, "f", "user.a", b"x"),
        ]

    yield as_user(USER, ordinary)
    os.chmod("f", 0o600)
    yield as_user(USER, lambda: [fails(os.getxattr, "f", "user.a"), sorted(os.listxattr("f"))])
    os.chmod("f", 0o604)
    yield as_user(USER, lambda: [outcome(os.getxattr, "f", "user.a")])
    yield as_user(USER, lambda: [fails(os.setxattr, "f", "user.a", b"x")])
    os.mkdir("sticky")
    os.chmod("sticky", 0o1777)
    yield as_user(USER, lambda: [fails(os.setxattr, "sticky", "user.a", b"x")])


@check()
def test_attributes_belong_to_the_inode() -> Iterator[object]:
    write("f")
    os.setxattr("f", "user.a", b"1")
    os.link("f", "g")
    os.rename("f", "h")
    yield os.getxattr("g", "user.a"), os.getxattr("h", "user.a")
    fd = os.open("h", os.O_RDWR)
    os.unlink("g")
    os.unlink("h")
    os.setxattr(fd, "user.b", b"2")
    yield os.getxattr(fd, "user.a"), sorted(os.listxattr(fd))
    write("h")
    yield os.listxattr("h")


# ---- ACLs ----


@check()
def test_setfacl_and_getfacl() -> Iterator[object]:
    write("f")
    os.mkdir("d")
    for path, args in (
        ("f", ["-m", "u:65534:rw,g:4711:r"]),
        ("f", ["-m", "m::r"]),
        ("f", ["-x", "u:65534"]),
        ("f", ["-m", "u::r,g::-,o::x"]),
        ("f", ["-b"]),
        ("f", ["-m", "d:u:1:r"]),
        ("d", ["-m", "d:u:65534:rwx,d:g:4711:rx"]),
        ("d", ["-m", "u:1:rwx,m::rx"]),
        ("d", ["-k"]),
        ("d", ["-b"]),
        ("d", ["--set", "u::rwx,g::rx,o::-,u:7:r,m::rwx"]),
    ):
        yield args, setfacl(*args, path), getfacl(path), sorted(os.listxattr(path))
        yield oct(os.stat(path).st_mode)


@check()
def test_chmod_and_the_mask() -> Iterator[object]:
    write("f")
    os.chmod("f", 0o664)
    setfacl("-m", "u:65534:rw,g:4711:rwx", "f")
    for mode in (0o600, 0o640, 0o777, 0o4750, 0o000):
        os.chmod("f", mode)
        yield oct(os.stat("f").st_mode), getfacl("f")
    os.mkdir("d")
    setfacl("-m", "d:u:65534:rw,u:1:x", "d")
    os.chmod("d", 0o2705)
    yield oct(os.stat("d").st_mode), getfacl("d")
    # An ACL that a mode can say is not kept as one.
    os.setxattr("f", ACCESS, acl(("u:", 6), ("g:", 4), ("o", 0)))
    yield oct(os.stat("f").st_mode), os.listxattr("f")


@check(root=True)  # some defaults shut out the owner
def test_inheritance() -> Iterator[object]:
    defaults = (
        "d:u::rwx,d:g::rx,d:o::-",
        "d:u::rwx,d:g::rx,d:o::rx,d:u:65534:rwx,d:g:4711:r",
        "d:u::rw,d:g::-,d:o::-,d:u:65534:rwx,d:m::r",
        "d:u::-,d:g::-,d:o::-",
    )
    for number, default in enumerate(defaults):
        os.mkdir(f"d{number}")
        setfacl("-m", default, f"d{number}")
        for mask in (0, 0o022, 0o077):
            os.umask(mask)
            base = f"d{number}/{mask:o}-"
            for mode in (0o666, 0o777, 0o640, 0o4755):
                os.close(os.open(f"{base}f{mode:o}", os.O_CREAT | os.O_WRONLY, mode))
                os.mkdir(f"{base}d{mode:o}", mode)
                names = [f"{base}f{mode:o}", f"{base}d{mode:o}"]
                yield default, oct(mask), oct(mode), getfacl(*names)
            os.mkfifo(f"{base}p", 0o666)
            os.symlink("x", f"{base}l")
            os.mkdir(f"{base}d777/below")
            yield getfacl(f"{base}p", f"{base}d777/below")
            yield os.listxattr(f"{base}l", follow_symlinks=False)
        os.umask(0o022)


@check()
def test_acls_that_are_refused() -> Iterator[object]:
    write("f")
    os.mkdir("d")
    os.symlink("f", "l")
    whole = (("u:", 7), ("g:", 5), ("o", 5))
    for name, value in {
        "empty": b"",
        "only a header": acl(),
        "short": acl(*whole)[:-1],
        "version 1": b"\1\0\0\0" + acl(*whole)[4:],
        "no owner": acl(*whole[1:]),
        "no other": acl(*whole[:2]),
        "no mask": acl(whole[0], ("u", 7, 1), *whole[1:]),
        "twice": acl(whole[0], *whole),
        "out of order": acl(whole[1], whole[0], whole[2]),
        "permissions": acl(("u:", 8), *whole[1:]),
        "right": acl(whole[0], ("u", 7, 1), whole[1], ("m", 7), whole[2]),
    }.items():
        for path in ("f", "d"):
            for attribute in (ACCESS, DEFAULT):
                error = fails(os.setxattr, path, attribute, value)
                yield name, path, attribute, error, oct(os.stat(path).st_mode)
    yield fails(os.removexattr, "f", DEFAULT), fails(os.removexattr, "d", DEFAULT)
    yield fails(os.removexattr, "f", ACCESS), fails(os.removexattr, "f", ACCESS)
    yield oct(os.stat("f").st_mode), sorted(os.listxattr("d"))
    yield fails(os.getxattr, "f", ACCESS), fails(os.getxattr, "f", DEFAULT)
    yield fails(os.setxattr, "l", ACCESS, acl(*whole), follow_symlinks=False)
    yield fails(os.setxattr, "d", ACCESS, acl(*whole), os.XATTR_CREATE)


@check(root=True)
def test_acls_are_obeyed() -> Iterator[object]:
    write("f", b"secret")
    os.mkdir("d")
    write("d/f")

    def tries() -> list[object]:
        return [
            *(opens("f", flags) for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR)),
            [os.access("f", mode) for mode in (os.R_OK, os.W_OK, os.X_OK)],
            outcome(os.listdir, "d"),
            opens("d/f", os.O_RDONLY),
            fails(os.mkdir, "d/new") or fails(os.rmdir, "d/new"),
            fails(os.chmod, "f", 0o777),
            fails(os.setxattr, "f", ACCESS, acl(("u:", 7), ("g:", 7), ("o", 7))),
        ]

    for entries in (
        "u::rw,g::-,o::-",
        "u::rw,g::-,o::rw,u:65534:-,m::rwx",
        "u::rw,g::-,o::-,u:65534:rw,m::r",
        "u::rw,g::-,o::-,u:65534:rwx,m::rwx",
        "u::rw,g::-,o::rwx,g:4711:-,m::rwx",
        "u::rw,g::-,o::-,g:4711:r,g:65534:wx,m::rwx",
    ):
        for path in ("f", "d"):
            setfacl("--set", entries, path)
        for uid, groups in ((USER, []), (OTHER, []), (USER, [OTHER]), (7, [OTHER, USER])):
            yield entries, uid, groups, as_user(uid, tries, groups=groups)


@check(root=True)
def test_setting_an_acl_may_clear_setgid() -> Iterator[object]:
    value = acl(("u:", 7), ("g:", 5), ("o", 5))
    for uid, gid, groups in ((0, 0, []), (USER, USER, []), (USER, OTHER, []), (USER, 7, [OTHER])):
        write("f")
        os.chown("f", USER, OTHER)
        os.chmod("f", 0o6755)
        error = as_user(uid, lambda: fails(os.setxattr, "f", ACCESS, value), gid=gid, groups=groups)
        yield uid, gid, groups, error, oct(os.stat("f").st_mode)
        os.unlink("f")


@check()
def test_changing_an_acl_changes_ctime() -> Iterator[object]:
    write("f")
    before = os.stat("f").st_ctime_ns
    tick()
    setfacl("-m", "u:65534:rw", "f")
    between = os.stat("f").st_ctime_ns
    tick()
    setfacl("-b", "f")
    yield before < between < os.stat("f").st_ctime_ns, os.listxattr("f")
