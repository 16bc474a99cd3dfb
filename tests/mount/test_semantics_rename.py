"""Rename: every kind onto every kind, with and without flags."""

import itertools
import os
import shutil
from collections.abc import Iterator

from tests.mount.posix_checks import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    check,
    fails,
    read,
    rename2,
    start,
    write,
)

KINDS = ("none", "file", "empty", "full", "link", "dangling", "fifo")
FLAGS = (0, RENAME_NOREPLACE, RENAME_EXCHANGE)


def make(kind: str, name: str) -> None:
    """Make a file of a kind, recognisable by its name."""
    if kind == "file":
        write(name, f"contents of {name}")
    elif kind in {"empty", "full"}:
        os.mkdir(name)
        if kind == "full":
            write(f"{name}/child", f"child of {name}")
    elif kind in {"link", "dangling"}:
        os.symlink("target" if kind == "link" else f"nowhere {name}", name)
    elif kind == "fifo":
        os.mkfifo(name, 0o600 if name == "old" else 0o640)


def tree(folder: str) -> list[object]:
    """Return everything in a folder: names, kinds, link counts, contents."""
    found: list[object] = []
    for where, folders, files in os.walk(folder):
        for name in folders + files:
            path = f"{where}/{name}"
            info = os.lstat(path)
            what = os.readlink(path) if os.path.islink(path) else None
            if what is None and os.path.isfile(path):
                what = read(path).decode()
            found.append((path, oct(info.st_mode), info.st_nlink, what))
    return sorted(found, key=repr)


@check()
def test_every_kind_onto_every_kind() -> Iterator[object]:
    os.mkdir("d")
    os.chdir("d")
    for old, new, flags in itertools.product(KINDS, KINDS, FLAGS):
        os.mkdir("a")
        os.chdir("a")
        write("target", "of links")
        make(old, "old")
        make(new, "new")
        error = fails(rename2, "old", "new", flags)
        yield old, new, flags, error, tree(".")
        os.chdir("..")
        shutil.rmtree("a")


@check()
def test_between_directories() -> Iterator[object]:
    kinds = ("none", "file", "empty", "full")  # those that parents count, and those they do not
    for old, new, flags in itertools.product(kinds, kinds, FLAGS):
        os.mkdir("a")
        os.mkdir("b")
        make(old, "a/old")
        make(new, "b/new")
        yield old, new, flags, fails(rename2, "a/old", "b/new", flags), tree(".")
        for side in ("a", "b"):
            for name in os.listdir(side):
                if os.path.isdir(f"{side}/{name}") and not os.path.islink(f"{side}/{name}"):
                    parent = os.stat(f"{side}/{name}/..").st_ino
                    assert parent == os.stat(side).st_ino
        yield os.stat("a").st_nlink, os.stat("b").st_nlink, os.stat(".").st_nlink
        shutil.rmtree("a")
        shutil.rmtree("b")


@check()
def test_into_itself() -> Iterator[object]:
    os.makedirs("a/b/c")
    os.mkdir("x")
    for flags in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
        for old, new in (
            ("a", "a/b/new"),
            ("a", "a/b"),
            ("a", "a/b/c"),
            ("a/b/c", "a"),
            ("a/b", "a"),
            ("a", "a"),
            ("a/b", "a/b/."),
            ("a/b", "a/b/.."),
            ("a", "x/../a/b/n"),
        ):
            yield flags, old, new, fails(rename2, old, new, flags), tree(".")


@check()
def test_flags_that_do_not_go_together() -> Iterator[object]:
    write("f", "one")
    write("g", "two")
    for flags in (RENAME_NOREPLACE | RENAME_EXCHANGE, RENAME_WHITEOUT | RENAME_EXCHANGE, 0x80):
        yield flags, fails(rename2, "f", "g", flags), tree(".")


@check()
def test_links_of_one_file() -> Iterator[object]:
    write("f", "same")
    os.link("f", "g")
    for flags in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
        yield fails(rename2, "f", "g", flags), fails(rename2, "f", "f", flags), tree(".")


@check()
def test_names_of_odd_form() -> Iterator[object]:
    write("f", "file")
    os.mkdir("d")
    write("d/child", "child")
    for old, new in (
        ("f", "new/"),
        ("f/", "new"),
        ("f", "n" * 256),
        ("n" * 256, "f"),
        ("f", "none/new"),
        ("none/f", "f"),
        ("f", "f/new"),
        ("d", "d2/"),
        ("d2/", "d"),
        (".", "x"),
        ("d", "."),
        ("..", "x"),
    ):
        yield old, new, fails(os.rename, old, new), tree(".")


@check()
def test_a_replacing_rename_is_never_seen_half_done() -> Iterator[object]:
    write("config", b"0" * 5000)

    def replace() -> int:
        for number in range(1, 150):
            write("config.new", b"%d" % (number % 10) * 5000)
            os.rename("config.new", "config")
        return 149

    wait = start(replace)
    seen = 0
    for _ in range(300):
        contents = read("config")
        assert len(contents) == 5000 and len(set(contents)) == 1
        seen += 1
    yield wait(), seen, os.listdir(".")


@check()
def test_exchange_keeps_both_whole() -> Iterator[object]:
    write("f", "the file")
    os.makedirs("d/sub")
    write("d/sub/x", "deep")
    os.mkdir("e")
    before = os.stat("f").st_ino, os.stat("d").st_ino
    held = os.open("f", os.O_RDONLY)
    rename2("f", "d", RENAME_EXCHANGE)
    assert (os.stat("d").st_ino, os.stat("f").st_ino) == before
    yield read("d"), read("f/sub/x"), os.read(held, 100), os.stat(".").st_nlink
    rename2("f/sub", "e", RENAME_EXCHANGE)
    yield tree(".")
    rename2("f/sub", "d", RENAME_EXCHANGE)
    yield tree(".")
