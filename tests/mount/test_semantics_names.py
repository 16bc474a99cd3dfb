"""Names: their bytes and lengths, links, directories."""

import os
import random
from collections.abc import Iterator

from tests.mount.posix_checks import check, fails, opens, outcome, read, write


@check()
def test_names_of_any_bytes() -> Iterator[object]:
    names = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    names += [b"\xff" * 255, bytes(range(1, 47)) + bytes(range(48, 256)), b"a" * 255, b"...", b". "]
    names += [
        "caf\u00e9".encode(),
        "cafe\u0301".encode(),
        b"caf\xe9",
        b"CASE",
        b"case",
        b"-rf",
        b"\n",
    ]
    random_ = random.Random(4)
    for _ in range(100):
        name = random_.randbytes(random_.randrange(1, 256))
        names.append(name.replace(b"\0", b"0").replace(b"/", b"1"))
    unique = sorted({name for name in names if name not in {b".", b".."}})
    for number, name in enumerate(unique):
        write(name, b"%d" % number)
    assert sorted(os.listdir(b".")) == unique
    for number, name in enumerate(unique):
        assert read(name) == b"%d" % number
        os.rename(name, b"moved")
        assert fails(os.stat, name) == "ENOENT"
        os.rename(b"moved", name)
    yield len(unique)
    for name in unique:
        os.unlink(name)
    yield os.listdir(b".")


@check()
def test_lengths() -> Iterator[object]:
    for length in (255, 256, 1000, 4095, 4096, 5000):
        name = "n" * length
        yield length, opens(name, os.O_CREAT | os.O_WRONLY), fails(os.mkdir, name + "d")
        yield fails(os.stat, name), fails(os.symlink, name, f"link-{length}")
        yield fails(os.readlink, f"link-{length}"), fails(os.rename, "n" * 255, name)
        yield fails(os.link, "n" * 255, name + "l"), fails(os.unlink, name), fails(os.rmdir, name)
    for target in (b"\xff" * 4095, b"x", b"../" * 1000, bytes(range(1, 256))):
        os.symlink(target, b"l")
        assert os.readlink(b"l") == target and os.lstat("l").st_size == len(target)
        os.unlink("l")
    yield fails(os.symlink, "", "empty"), opens("", os.O_RDONLY), fails(os.mkdir, "")


@check()
def test_symbolic_links() -> Iterator[object]:
    os.mkdir("d")
    write("d/f", b"inside")
    os.symlink("d", "to-dir")
    os.symlink("to-dir/f", "to-file")
    os.symlink("b", "a")
    os.symlink("a", "b")
    os.symlink("none", "dangling")
    yield read("to-file"), os.listdir("to-dir"), opens("a", os.O_RDONLY)
    yield oct(os.lstat("to-dir").st_mode), os.lstat("to-dir").st_size
    yield fails(os.rmdir, "to-dir"), fails(os.readlink, "d"), fails(os.mkdir, "dangling")
    yield (
        fails(os.symlink, "x", "dangling"),
        fails(os.unlink, "to-dir/"),
        fails(os.unlink, "to-dir"),
    )
    os.link("to-file", "hard", follow_symlinks=False)
    assert os.readlink("hard") == "to-dir/f"
    yield os.lstat("hard").st_nlink
    previous = "end"
    write(previous, b"reached")
    for number in range(45):
        os.symlink(previous, f"chain-{number}")
        previous = f"chain-{number}"
    yield [outcome(read, f"chain-{number}") for number in (38, 39, 40, 41, 44)]


@check()
def test_hard_links() -> Iterator[object]:
    write("f", b"one file")
    os.mkdir("d")
    for number in range(100):
        os.link("f", f"d/l{number}")
    assert {os.stat(f"d/l{number}").st_ino for number in range(100)} == {os.stat("f").st_ino}
    yield os.stat("f").st_nlink
    with open("d/l7", "ab") as file:
        file.write(b", written through a link")
    yield (
        read("f"),
        fails(os.link, "d", "dd"),
        fails(os.link, "f", "d/l1"),
        fails(os.link, "f", "d"),
    )
    yield fails(os.link, "none", "x"), fails(os.link, "f", "none/x")
    os.unlink("f")
    os.chmod("d/l1", 0o600)
    yield oct(os.stat("d/l99").st_mode), os.stat("d/l99").st_nlink
    for number in range(100):
        os.unlink(f"d/l{number}")
    yield os.listdir("d")


@check()
def test_directories() -> Iterator[object]:
    os.mkdir("d")
    links = [os.stat("d").st_nlink]
    for name in ("a", "b", "c"):
        os.mkdir(f"d/{name}")
        links.append(os.stat("d").st_nlink)
    write("d/f")
    os.rmdir("d/b")
    links.append(os.stat("d").st_nlink)
    os.rename("d/a", "a")
    links.append(os.stat("d").st_nlink)
    os.rename("a", "d/b")
    links.append(os.stat("d").st_nlink)
    yield links
    yield fails(os.rmdir, "d"), fails(os.rmdir, "d/f"), fails(os.unlink, "d/b")
    yield fails(os.mkdir, "d"), fails(os.mkdir, "d/f"), fails(os.mkdir, "d/f/x")
    yield fails(os.rmdir, "."), fails(os.rmdir, "d/b/."), fails(os.rmdir, "d/b/..")
    yield fails(os.rmdir, "none"), fails(os.mkdir, "none/x"), fails(os.unlink, "none")
    yield fails(os.mkdir, "slash/"), fails(os.rmdir, "slash/"), opens("x/", os.O_CREAT | os.O_RDWR)
    assert os.stat("d/b/..").st_ino == os.stat("d").st_ino
    assert os.stat("d/.").st_ino == os.stat("d").st_ino


@check()
def test_a_name_that_was_missing_appears() -> Iterator[object]:
    for make in (
        lambda name: write(name, b"x"),
        os.mkdir,
        os.mkfifo,
        lambda name: os.symlink("there", name),
        lambda name: os.link("source", name),
        lambda name: os.rename("moving", name),
    ):
        write("source")
        write("moving")
        assert fails(os.lstat, "n") == "ENOENT"  # the kernel remembers this
        make("n")
        yield oct(os.lstat("n").st_mode)
        os.rmdir("n") if os.path.isdir("n") else os.unlink("n")
        assert fails(os.lstat, "n") == "ENOENT"


@check()
def test_deep_trees() -> Iterator[object]:
    top = os.open(".", os.O_RDONLY)
    here = top
    name = "deep" * 60
    for level in range(300):
        os.mkdir(name, dir_fd=here)
        here = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(os.open(f"file {level}", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    yield sorted(os.listdir(here))
    os.fsync(here)
    # Up again, which looks for each parent.
    for _ in range(300):
        up = os.open("..", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = up
    assert os.fstat(here).st_ino == os.fstat(top).st_ino
    path = "/".join([name] * 16)
    yield fails(os.stat, path), fails(os.stat, "/".join([name] * 17)), os.listdir(path) != []
    os.chdir("/".join([name] * 10))
    yield len(os.listdir("."))
