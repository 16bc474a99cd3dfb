"""docs/conformance.md is the whole list of deviations: each line of it is true, and no more."""

import os
import sys
from pathlib import Path

import pytest

from tests.mount.harness import Volume, run

PRELUDE = """
import ctypes, errno, fcntl, os, stat
libc = ctypes.CDLL(None, use_errno=True)
LONG = ctypes.c_long

def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    return 'ok' if result >= 0 else errno.errorcode[ctypes.get_errno()]

def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]

def same(found, expected):
    assert found == expected, (found, expected)

fd = os.open('f', os.O_RDWR | os.O_CREAT)
os.write(fd, b'x' * 8192)
"""

REFUSED = """
for mode in (0, 1, 3, 0x10, 0x11, 8, 0x20, 0x40):
    same(call('fallocate', fd, mode, LONG(0), LONG(4096)), 'ENOTSUP')
same(libc.posix_fallocate(fd, LONG(0), LONG(1 << 20)), 0)
same(os.fstat(fd).st_size, 1 << 20)
same(attempt(os.open, '.', os.O_TMPFILE | os.O_RDWR), 'ENOTSUP')
same(attempt(fcntl.ioctl, fd, 0x80086601, bytes(8)), 'ENOTTY')
os.close(os.open('g', os.O_CREAT))
same(call('renameat2', -100, b'f', -100, b'g', 4), 'EINVAL')
"""

LESS = """
os.ftruncate(fd, 1 << 20)
same(os.lseek(fd, 0, os.SEEK_DATA), 0)
same(os.lseek(fd, 0, os.SEEK_HOLE), 1 << 20)
same(attempt(os.lseek, fd, 1 << 20, os.SEEK_DATA), 'ENXIO')
other = os.open('g', os.O_RDWR | os.O_CREAT)
same(os.copy_file_range(fd, other, 4096, 0, 0), 4096)
same(os.pread(other, 5000, 0), b'x' * 4096)
os.utime('f', ns=(1, 2))
os.pread(fd, 100, 0)
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
os.pread(fd, 100, 0)
same(os.stat('f').st_atime_ns, 1)
buffer = ctypes.create_string_buffer(256)
same(libc.statx(-100, b'f', 0, 0xfff, buffer), 0)
same(int.from_bytes(buffer[:4], 'little') & 0x800, 0)
"""

WHOLE = """
fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
again = os.open('f', os.O_RDWR)
same(attempt(fcntl.flock, again, fcntl.LOCK_SH | fcntl.LOCK_NB), 'EAGAIN')
os.close(os.open('a', os.O_CREAT))
os.close(os.open('b', os.O_CREAT))
numbers = os.stat('a').st_ino, os.stat('b').st_ino
same(call('renameat2', -100, b'a', -100, b'b', 1), 'EEXIST')
same(call('renameat2', -100, b'a', -100, b'b', 2), 'ok')
same((os.stat('b').st_ino, os.stat('a').st_ino), numbers)
same(attempt(os.mkdir, 'n' * 255), None)
same(attempt(os.mkdir, 'n' * 256), 'ENAMETOOLONG')
same(attempt(os.symlink, 't' * 4095, 'long'), None)
same(os.readlink('long'), 't' * 4095)
os.mkdir(b'\\xff\\xfe\\n')
assert b'\\xff\\xfe\\n' in os.listdir(b'.')
same(attempt(os.setxattr, 'f', 'user.' + 'n' * 250, bytes(65536)), None)
same(len(os.getxattr('f', 'user.' + 'n' * 250)), 65536)
same(attempt(os.setxattr, 'f', 'user.big', bytes(65537)), 'E2BIG')
space = os.statvfs('.')
assert space.f_bsize == space.f_frsize == 4096 and space.f_namemax == 255
assert 0 < space.f_bavail <= space.f_blocks and 0 < space.f_favail <= space.f_files
gone = os.open('gone', os.O_RDWR | os.O_CREAT)
os.unlink('gone')
os.write(gone, b'still here')
same(os.pread(gone, 100, 0), b'still here')
same(os.fstat(gone).st_nlink, 0)
append = os.open('f', os.O_WRONLY | os.O_APPEND)
os.write(append, b'end')
same(os.pread(fd, 10, 8192), b'end')
"""

SET_ID = """
os.chmod('f', 0o6777)
os.chmod('.', 0o777)
child = os.fork()
if child == 0:
    os.setgid(65534)
    os.setuid(65534)
    descriptor = os.open('f', os.O_WRONLY)
    os.write(descriptor, b'y')
    os._exit(0)
same(os.waitpid(child, 0)[1], 0)
same(stat.S_IMODE(os.stat('f').st_mode), 0o777)
os.chmod('f', 0o6755)
os.pwrite(fd, b'z', 0)
same(stat.S_IMODE(os.stat('f').st_mode), 0o6755)
os.chown('f', 1, 1)
same(stat.S_IMODE(os.stat('f').st_mode), 0o755)
"""


def check(volume: Volume, code: str) -> None:
    run([sys.executable, "-I", "-c", PRELUDE + code], cwd=volume.point)


def test_deviations(volume: Volume) -> None:
    with volume.mounted():
        for number, code in enumerate((REFUSED, LESS)):
            folder = volume.point / str(number)
            run(["mkdir", folder])
            run([sys.executable, "-I", "-c", PRELUDE + code], cwd=folder)


def test_what_is_not_on_the_list(volume: Volume) -> None:
    with volume.mounted():
        check(volume, WHOLE)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_writing_clears_set_id_bits_of_those_who_may_not_keep_them(volume: Volume) -> None:
    # The mount point must be in reach of the other user; pytest's folders are not.
    for folder in volume.point.parents:
        if str(folder).startswith("/tmp/"):
            Path(folder).chmod(0o711)
    with volume.mounted("-o", "allow_other"):
        check(volume, SET_ID)
