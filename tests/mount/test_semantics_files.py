"""Files: their kinds, open flags, contents, files without a name, holes."""

import hashlib
import itertools
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from functools import partial

from tests.mount.posix_checks import (
    AT_EMPTY_PATH,
    AT_FDCWD,
    check,
    fails,
    in_child,
    opens,
    outcome,
    read,
    start,
    system,
    write,
)

# Where the representation changes: contents in the row, one node, a level of the tree.
EDGES = (0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 65536, 1 << 20)


def kind(path: str) -> tuple[int, int, int]:
    """Return what tells kinds of files apart: type and mode, device number, links."""
    info = os.lstat(path)
    return info.st_mode, info.st_rdev, info.st_nlink


# ---- kinds ----


@check()
def test_kinds() -> Iterator[object]:
    write("file")
    os.mkdir("dir")
    os.symlink("file", "link")
    os.mkfifo("fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name in ("file", "dir", "link", "fifo", "socket"):
            yield name, kind(name)
    assert stat.S_ISFIFO(os.stat("fifo").st_mode) and stat.S_ISSOCK(os.stat("socket").st_mode)
    yield [(name, opens(name, os.O_WRONLY | os.O_NONBLOCK)) for name in ("dir", "fifo", "socket")]


@check()
def test_fifos_and_sockets_work() -> Iterator[object]:
    os.mkfifo("fifo")
    wait = start(lambda: write("fifo", b"through the pipe"))
    yield read("fifo")
    wait()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind("socket")
        listener.listen()
        client.connect("socket")
        client.sendall(b"through the socket")
        with listener.accept()[0] as connection:
            yield connection.recv(100)
    with socket.socket(socket.AF_UNIX) as client:
        yield fails(client.connect, "socket")


@check(root=True)
def test_devices() -> Iterator[object]:
    for number, (major, minor) in enumerate([(1, 3), (0, 0), (4095, 1048575), (255, 256)]):
        for type_ in (stat.S_IFCHR, stat.S_IFBLK):
            name = f"{type_}-{number}"
            os.mknod(name, type_ | 0o620, os.makedev(major, minor))
            assert os.stat(name).st_rdev == os.makedev(major, minor)
            yield kind(name)
    yield fails(os.mknod, "dir", stat.S_IFDIR | 0o755)
    os.mknod("regular", stat.S_IFREG | 0o4755)
    os.mknod("fifo", stat.S_IFIFO | 0o600)
    yield kind("regular"), kind("fifo")


# ---- open ----


@check()
def test_open_flags() -> Iterator[object]:
    write("file", b"contents")
    os.mkdir("dir")
    os.symlink("file", "link")
    os.symlink("nowhere", "dangling")
    os.symlink("loop", "loop")
    paths = ("file", "file/", "dir", "dir/", "link", "dangling", "loop", "none", "none/", "file/x")
    flags = {
        "read": os.O_RDONLY,
        "write": os.O_WRONLY,
        "excl": os.O_CREAT | os.O_EXCL | os.O_WRONLY,
        "directory": os.O_DIRECTORY,
        "nofollow": os.O_NOFOLLOW,
        "create directory": os.O_CREAT | os.O_DIRECTORY,
        "path": os.O_PATH,
        "truncate directory": os.O_WRONLY | os.O_TRUNC | os.O_DIRECTORY,
    }
    for path, (name, flag) in itertools.product(paths, flags.items()):
        yield path, name, opens(path, flag)
    yield "create a directory's name", opens("dir", os.O_CREAT | os.O_WRONLY)
    assert read("file") == b"contents"
    yield sorted(os.listdir("."))
    yield "create through a dangling link", opens("dangling", os.O_CREAT | os.O_WRONLY)
    yield sorted(os.listdir("."))


@check()
def test_one_of_many_creates_exclusively() -> Iterator[object]:
    go, ready = os.pipe()

    def contend() -> int:
        os.close(ready)
        os.read(go, 1)  # returns when nobody can write any more
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        return sum(opens(f"round-{number}", flags) is None for number in range(50))

    waits = [start(contend) for _ in range(4)]
    os.close(ready)
    won = [wait() for wait in waits]
    assert sum(won) == 50, won
    yield len(os.listdir("."))


@check()
def test_open_truncates() -> Iterator[object]:
    for size in EDGES:
        name = str(size)
        write(name, b"old" * (size // 3 + 1))
        held = os.open(name, os.O_RDWR)
        os.close(os.open(name, os.O_WRONLY | os.O_TRUNC))
        assert os.fstat(held).st_size == 0 and os.pread(held, 100, 0) == b""
        os.pwrite(held, b"n", size)
        assert os.pread(held, size + 100, 0) == bytes(size) + b"n"
        os.close(held)
        yield len(read(name))
    write("w", b"x")
    os.close(os.open("w", os.O_RDONLY | os.O_TRUNC))
    yield os.stat("w").st_size


@check()
def test_appends_of_processes_do_not_mix() -> Iterator[object]:
    def append(writer: int) -> None:
        fd = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for number in range(200):
            os.write(fd, b"%d %d %s\n" % (writer, number, b"x" * (number % 97)))

    for wait in [start(partial(append, writer)) for writer in range(4)]:
        wait()
    lines = read("log").splitlines()
    for writer in range(4):
        own = [line for line in lines if line.startswith(b"%d " % writer)]
        assert own == [b"%d %d %s" % (writer, n, b"x" * (n % 97)) for n in range(200)]
    assert len(lines) == 800
    fd = os.open("log", os.O_WRONLY | os.O_APPEND)
    os.lseek(fd, 0, os.SEEK_SET)
    os.write(fd, b"end")
    os.pwrite(fd, b"?", 0)  # Linux appends all the same
    yield read("log")[-4:], os.lseek(fd, 0, os.SEEK_CUR) - os.stat("log").st_size


@check()
def test_access_modes_hold() -> Iterator[object]:
    write("f", b"12345")
    reader, writer = os.open("f", os.O_RDONLY), os.open("f", os.O_WRONLY)
    yield fails(os.write, reader, b"x"), fails(os.read, writer, 1)
    yield fails(os.ftruncate, reader, 0), fails(os.read, os.open(".", os.O_RDONLY), 1)
    yield fails(os.pread, reader, 1, -1), fails(os.truncate, "f", -1)
    yield fails(os.lseek, reader, -1, os.SEEK_SET), os.lseek(reader, 1000, os.SEEK_SET)
    yield os.read(reader, 10), os.pread(reader, 10, 3), os.pread(reader, 10, 5)


# ---- contents ----


@check()
def test_contents_beside_a_model() -> Iterator[object]:
    random_ = random.Random(1)
    for name in ("a", "b"):
        model = bytearray()
        fd = os.open(name, os.O_RDWR | os.O_CREAT)
        for _ in range(300):
            offset = random_.choice(EDGES) + random_.randrange(-3, 4)
            offset = max(offset, 0)
            length = random_.choice((1, 7, 100, 4096, 5000, 70000))
            what = random_.randrange(8)
            if what < 3:
                data = random_.randbytes(length)
                assert os.pwrite(fd, data, offset) == length
                model.extend(bytes(max(offset - len(model), 0)))
                model[offset : offset + length] = data
            elif what < 5:
                os.ftruncate(fd, offset)
                model.extend(bytes(max(offset - len(model), 0)))
                del model[offset:]
            elif what == 5:
                os.fsync(fd)
            elif what == 6:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, length, offset) == model[offset : offset + length]
            assert os.fstat(fd).st_size == len(model)
        assert os.pread(fd, len(model) + 1, 0) == model
        os.close(fd)
        yield hashlib.sha256(read(name)).hexdigest()


@check()
def test_truncation_leaves_no_old_bytes() -> Iterator[object]:
    for size in EDGES[1:]:
        for way in ("cached", "synced", "dropped"):
            fd = os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            os.write(fd, b"\xff" * size)
            if way != "cached":
                os.fsync(fd)
            os.ftruncate(fd, size // 2)
            if way == "dropped":
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.ftruncate(fd, size + 10)
            expected = b"\xff" * (size // 2) + bytes(size + 10 - size // 2)
            assert os.pread(fd, size + 100, 0) == expected, (size, way)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, size + 100, 0) == expected, (size, way)
            os.close(fd)
    yield "right"


@check()
def test_ways_to_read_and_write() -> Iterator[object]:
    data = random.Random(2).randbytes(3 << 20)
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    assert os.writev(fd, [data[:1000], data[1000:500_000], data[500_000:]]) == len(data)
    buffers = [bytearray(10), bytearray(1 << 20), bytearray(100)]
    yield os.preadv(fd, buffers, 12345)
    assert b"".join(buffers) == data[12345:][: 110 + (1 << 20)]
    out = os.open("out", os.O_RDWR | os.O_CREAT)
    sent = 0
    while sent < len(data):
        sent += os.sendfile(out, fd, sent, len(data) - sent)
    assert read("out") == data
    there, here = os.pipe()
    assert os.splice(fd, here, 4096, offset_src=777) == 4096
    assert os.splice(there, out, 4096, offset_dst=0) == 4096
    assert os.pread(out, 4096, 0) == data[777 : 777 + 4096]
    copied = os.open("copied", os.O_RDWR | os.O_CREAT)
    done = 0
    while done < len(data):
        done += os.copy_file_range(fd, copied, len(data) - done, done, done)
    assert read("copied") == data
    for flags in (os.O_SYNC, os.O_DSYNC, os.O_SYNC | os.O_APPEND):
        synced = os.open("synced", os.O_WRONLY | os.O_CREAT | flags)
        yield os.write(synced, b"durable"), read("synced")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


@check()
def test_ways_to_make_durable() -> Iterator[object]:
    write("f", b"x" * 10_000)
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_APPEND):
        fd = os.open("f", flags)
        yield fails(os.fsync, fd), fails(os.fdatasync, fd), fails(system, "syncfs", fd)
        yield fails(system, "sync_file_range", fd, 0, 4096, 7)
    os.mkfifo("fifo")
    yield fails(os.fsync, os.open("fifo", os.O_RDWR)), fails(os.fsync, os.open(".", os.O_RDONLY))
    yield fails(os.fsync, os.open("f", os.O_PATH))


@check()
def test_limits_of_a_process() -> Iterator[object]:
    def limited() -> list[object]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        fd = os.open("f", os.O_RDWR | os.O_CREAT)
        return [
            outcome(os.write, fd, b"x" * 10_000),
            outcome(os.write, fd, b"x"),
            fails(os.ftruncate, fd, 5001),
            os.fstat(fd).st_size,
        ]

    yield in_child(limited)


@check()
def test_copying_within_a_file() -> Iterator[object]:
    data = random.Random(9).randbytes(100_000)
    write("f", data)
    fd = os.open("f", os.O_RDWR)
    yield os.copy_file_range(fd, fd, 40_000, 0, 60_000)
    assert read("f") == data[:60_000] + data[:40_000]
    yield fails(os.copy_file_range, fd, fd, 40_000, 0, 20_000)
    yield os.copy_file_range(fd, fd, 1000, 99_990, 0), os.copy_file_range(fd, fd, 10, 200_000, 0)


@check()
def test_direct_io() -> Iterator[object]:
    import mmap  # noqa: PLC0415

    data = random.Random(3).randbytes(2 << 20)
    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    direct = os.open("f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    cached = os.open("f", os.O_RDWR)
    yield os.pwritev(direct, [buffer], 0)
    assert os.pread(cached, len(data) + 1, 0) == data
    os.pwrite(cached, b"patched", 5000)  # dirty in the page cache only
    buffer[:] = bytes(len(data))
    yield os.preadv(direct, [buffer], 0)
    assert buffer[:] == data[:5000] + b"patched" + data[5007:]
    buffer[:] = b"\x11" * len(data)
    os.pwritev(direct, [buffer], 0)
    assert os.pread(cached, 10, 5000) == b"\x11" * 10
    yield os.preadv(direct, [buffer], 2 << 20), os.fstat(direct).st_size


@check()
def test_parallel_reads_and_writes_of_one_file() -> Iterator[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    failed: list[str] = []

    def work(lane: int) -> None:
        for number in range(10):
            block = bytes([lane * 10 + number]) * 4096
            for page in range(lane, 256, 4):
                os.pwrite(fd, block, page * 4096)
                if os.pread(fd, 4096, page * 4096) != block:
                    failed.append(f"lane {lane} page {page}")

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[:5]
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    final = [os.pread(fd, 4096, page * 4096) for page in range(256)]
    assert final == [bytes([page % 4 * 10 + 9]) * 4096 for page in range(256)]
    yield "right"


# ---- files without a name ----


@check()
def test_unlinked_files_live_while_open() -> Iterator[object]:
    for size in (10, 100_000):
        write("f", b"x" * size)
        fd = os.open("f", os.O_RDWR)
        other = os.open("f", os.O_RDONLY)
        os.unlink("f")
        yield os.fstat(fd).st_nlink, os.fstat(fd).st_size, opens("f", os.O_RDONLY)
        os.pwrite(fd, b"more", size)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(other, size + 10, 0) == b"x" * size + b"more"
        os.ftruncate(fd, 5)
        os.fchmod(fd, 0o600)
        os.utime(fd, ns=(5, 6))
        yield os.fstat(other).st_size, oct(os.fstat(fd).st_mode), os.fstat(fd).st_mtime_ns
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        yield os.read(again, 10)
        where = f"/proc/self/fd/{fd}".encode()
        yield fails(system, "linkat", AT_FDCWD, where, AT_FDCWD, b"revived", 0x400)
        yield fails(system, "linkat", fd, b"", AT_FDCWD, b"revived", AT_EMPTY_PATH)
        for each in (fd, other, again):
            os.close(each)
    yield os.listdir(".")


@check()
def test_a_file_renamed_over_lives_while_open() -> Iterator[object]:
    for size in (10, 100_000):
        write("old", b"o" * size)
        write("new", b"n" * size)
        fd = os.open("old", os.O_RDWR)
        os.rename("new", "old")
        assert os.pread(fd, size, 0) == b"o" * size
        assert read("old") == b"n" * size
        os.pwrite(fd, b"w", 0)
        assert read("old")[:1] == b"n" and os.pread(fd, 2, 0) == b"wo"
        yield os.fstat(fd).st_nlink, os.stat("old").st_nlink
        os.close(fd)


@check()
def test_a_removed_directory_that_is_in_use() -> Iterator[object]:
    os.mkdir("d")

    def inside() -> list[object]:
        os.chdir("d")
        os.rmdir("../d")
        fd = os.open(".", os.O_RDONLY)
        return [
            os.fstat(fd).st_nlink,
            os.listdir("."),
            opens("new", os.O_CREAT | os.O_WRONLY),
            fails(os.mkdir, "new"),
            fails(os.symlink, "x", "new"),
            fails(os.rename, "../file", "new"),
            fails(os.link, "../file", "new"),
            fails(os.stat, "x"),
            fails(os.getcwd),
            outcome(os.fsync, fd),
        ]

    write("file")
    yield in_child(inside)
    os.mkdir("d")
    yield os.listdir("d")


@check()
def test_many_unlinked_files_at_once() -> Iterator[object]:
    held = []
    for number in range(200):
        write("same name", b"%d" % number * 1000)
        held.append(os.open("same name", os.O_RDONLY))
        os.unlink("same name")
    inodes = {os.fstat(fd).st_ino for fd in held}
    assert len(inodes) == 200
    for number, fd in enumerate(held):
        assert os.read(fd, 10_000) == b"%d" % number * 1000
        os.close(fd)
    yield os.listdir(".")


# ---- holes ----


@check()
def test_a_sparse_file_of_terabytes() -> Iterator[object]:
    tib = 1 << 40
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 9 * tib)
    assert os.fstat(fd).st_size == 9 * tib
    for offset in (0, tib - 3, 5 * tib + 4095, 9 * tib - 7):
        os.pwrite(fd, b"island!", offset)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in (0, tib - 3, 5 * tib + 4095, 9 * tib - 7):
        assert os.pread(fd, 7, offset) == b"island!"
        before = min(100, offset)
        assert os.pread(fd, before, offset - before) == bytes(before)
        yield os.pread(fd, 100, offset + 7) in {bytes(100), b""}
    assert os.fstat(fd).st_blocks * 512 < 1 << 20
    os.ftruncate(fd, 3)
    os.ftruncate(fd, 2 * tib)
    yield os.pread(fd, 7, 0), os.pread(fd, 7, tib - 3), os.fstat(fd).st_size


@check(same=False)
def test_sizes_have_a_limit_that_is_told() -> Iterator[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    largest = (1 << 63) - 1
    assert fails(os.ftruncate, fd, largest) in {"EFBIG", "EINVAL", None}
    assert fails(os.pwrite, fd, b"xx", largest) in {"EFBIG", "EINVAL"}
    os.ftruncate(fd, 0)
    os.write(fd, b"sound")
    yield read("f")


@check()
def test_holes_are_never_made_of_data() -> Iterator[object]:
    for size in (1, 2000, 5000, 300_000):
        fd = os.open("f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.write(fd, b"d" * size)
        os.lseek(fd, 0, os.SEEK_SET)
        # Written just now, still in the page cache.
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) == size
        assert os.fstat(fd).st_blocks > 0
        yield outcome(os.lseek, fd, size, os.SEEK_DATA), outcome(os.lseek, fd, size, os.SEEK_HOLE)
        os.close(fd)


@check()
def test_sparse_copies_keep_contents() -> Iterator[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"a" * 10_000, 0)
    os.pwrite(fd, b"b" * 10_000, 1 << 20)
    os.ftruncate(fd, 3 << 20)
    write("small", b"s" * 100)
    expected = {"f": read("f"), "small": read("small")}
    for way in ("auto", "always", "never"):
        subprocess.run(["cp", f"--sparse={way}", "f", "small", "-t", _new(way)], check=True)
        assert {name: read(f"{way}/{name}") for name in expected} == expected, way
    subprocess.run(["tar", "-S", "-cf", "tar", "f", "small"], check=True)
    subprocess.run(["tar", "-xf", "tar", "-C", _new("untar")], check=True)
    assert {name: read(f"untar/{name}") for name in expected} == expected
    yield sorted(os.listdir("untar"))


def _new(folder: str) -> str:
    os.mkdir(folder)
    return folder
