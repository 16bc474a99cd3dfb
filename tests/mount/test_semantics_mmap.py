"""Mapped files beside read and write, and other processes."""

import mmap
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator

from tests.mount.posix_checks import check, fails, in_child, read, start, tick, write

PAGE = mmap.PAGESIZE


@check()
def test_shared_mappings_and_calls_agree() -> Iterator[object]:
    write("f", b"a" * 3 * PAGE)
    fd = os.open("f", os.O_RDWR)
    with mmap.mmap(fd, 0) as shared:
        os.pwrite(fd, b"written", 100)
        assert shared[100:107] == b"written"
        shared[PAGE - 3 : PAGE + 3] = b"mapped"
        assert os.pread(fd, 6, PAGE - 3) == b"mapped"
        assert in_child(lambda: read("f")[PAGE - 3 : PAGE + 3]) == b"mapped"
        with mmap.mmap(os.open("f", os.O_RDWR), 0) as second:
            second[0:3] = b"two"
            assert shared[0:3] == b"two"
        shared.flush()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert shared[PAGE - 3 : PAGE + 3] == b"mapped" and shared[100:107] == b"written"
    yield read("f")[95:110]


@check()
def test_random_changes_through_both() -> Iterator[object]:
    size = 200_000
    random_ = random.Random(8)
    model = bytearray(random_.randbytes(size))
    write("f", bytes(model))
    fd = os.open("f", os.O_RDWR)
    with mmap.mmap(fd, size) as shared:
        for _ in range(400):
            length = random_.randrange(1, 9000)
            offset = random_.randrange(size - length)
            data = random_.randbytes(length)
            what = random_.randrange(5)
            if what == 0:
                shared[offset : offset + length] = data
                model[offset : offset + length] = data
            elif what == 1:
                os.pwrite(fd, data, offset)
                model[offset : offset + length] = data
            elif what == 2:
                shared.flush()
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert shared[offset : offset + length] == model[offset : offset + length]
            assert os.pread(fd, length, offset) == model[offset : offset + length]
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert read("f") == model
    yield "right"


@check()
def test_private_mappings_stay_private() -> Iterator[object]:
    write("f", b"o" * 2 * PAGE)
    fd = os.open("f", os.O_RDONLY)
    with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as private:
        private[10:17] = b"private"
        yield private[8:20], read("f")[8:20]
        in_child(lambda: _patch("f", PAGE + 5, b"others"))
        yield private[PAGE + 5 : PAGE + 11]
    yield fails(mmap.mmap, fd, 0, access=mmap.ACCESS_WRITE)


def _patch(path: str, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, offset)
    os.close(fd)


@check()
def test_two_processes_share_a_mapping() -> Iterator[object]:
    write("f", bytes(PAGE))
    with mmap.mmap(os.open("f", os.O_RDWR), 0) as shared:

        def answer() -> bool:
            with mmap.mmap(os.open("f", os.O_RDWR), 0) as theirs:
                while theirs[0] == 0:
                    pass
                theirs[1:6] = b"heard"
                theirs[0] = 2
            return True

        wait = start(answer)
        shared[0] = 1
        assert wait()
        yield shared[0:6]
    yield read("f")[:6]


@check()
def test_the_end_of_the_file() -> Iterator[object]:
    write("f", b"e" * 100)
    fd = os.open("f", os.O_RDWR)
    with mmap.mmap(fd, 100) as shared:
        # Bytes behind the end are zero, and what is stored there stays out of the file.
        yield shared[90:100]
        os.ftruncate(fd, 200)
        assert os.pread(fd, 200, 0) == b"e" * 100 + bytes(100)
    os.ftruncate(fd, 2 * PAGE)

    def beyond() -> bool:
        shared = mmap.mmap(fd, 2 * PAGE)
        os.ftruncate(fd, 10)
        assert shared[5] == ord("e") and shared[20] == 0
        return bool(shared[PAGE + 1])

    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGBUS, signal.SIG_DFL)
        beyond()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    yield os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS
    os.ftruncate(fd, PAGE)
    assert read("f") == b"e" * 10 + bytes(PAGE - 10)


@check()
def test_holes_can_be_mapped() -> Iterator[object]:
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 30)
    with mmap.mmap(fd, 1 << 30) as shared:
        yield shared[500 << 20]
        shared[700 << 20] = 7
        shared.flush()
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    yield os.pread(fd, 3, (700 << 20) - 1), os.fstat(fd).st_size
    assert os.fstat(fd).st_blocks * 512 < 1 << 20


@check()
def test_a_mapped_file_outlives_descriptor_and_name() -> Iterator[object]:
    write("f", b"x" * 100_000)
    fd = os.open("f", os.O_RDWR)
    with mmap.mmap(fd, 0) as shared:
        os.close(fd)
        os.unlink("f")
        shared[50_000:50_004] = b"late"
        shared.flush()
        yield shared[49_998:50_006], os.listdir(".")


@check()
def test_storing_through_a_mapping_changes_mtime() -> Iterator[object]:
    write("f", bytes(PAGE))
    os.utime("f", ns=(1, 2))
    with mmap.mmap(os.open("f", os.O_RDWR), 0) as shared:
        tick()
        yield shared[0], os.stat("f").st_mtime_ns
        shared[0] = 1
        shared.flush()
        os.fsync(os.open("f", os.O_RDWR))
    yield os.stat("f").st_mtime_ns != 2


@check()
def test_programs_run() -> Iterator[object]:
    shutil.copy("/bin/cat", "program")
    done = subprocess.run(["./program", "/dev/null"], check=False)
    yield done.returncode
    with subprocess.Popen(["./program"], stdin=subprocess.PIPE) as running:
        yield fails(os.open, "program", os.O_WRONLY), fails(os.truncate, "program", 0)
        os.rename("program", "renamed")
        running.communicate()
    write("script", b"#!/bin/sh\nexit 7\n")
    yield fails(subprocess.run, ["./script"])
    os.chmod("script", 0o755)
    yield subprocess.run(["./script"], check=False).returncode
