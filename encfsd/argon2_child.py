"""Argon2id in a process of its own; `keys.PassphraseStretcher` starts it and talks to it.

Why a process: the library copies the passphrase into its heap and needs up to 4 GiB. Both vanish
with the process; it can be killed at any time, and the kernel bounds its memory.

This file is run as a script and imports nothing of encfsd. The talk, on standard input and output:

====== ======================================================= ==================
from   message                                                 struct
====== ======================================================= ==================
child  one byte, once it runs                                  ``S``
parent the most memory that any request will use, KiB          ``<I``
child  one byte, once that memory has been seen to exist       ``R``
parent request: memory KiB, passes, salt, passphrase size      ``<II32sH``
parent the passphrase itself                                   bytes
child  the derived secret, 32 bytes; then the next request     bytes
====== ======================================================= ==================

The child ends at end of file. It says nothing about why it failed: its death is the message.
"""

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

REQUEST = struct.Struct("<II32sH")
STARTED = b"S"
READY = b"R"
LANES = 1  # one after another is how they would be computed: more lanes would only help attackers
SECRET_SIZE = 32

_SLACK = 64 << 20  # bytes the interpreter and the library may need beyond Argon2's own memory
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


def _confine(memory_kib: int) -> None:
    """Leave no core dump, die with the parent, be the first to die when memory is short."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * mmap.PAGESIZE
    limit = mapped + memory_kib * 1024 + _SLACK
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _touch(memory_kib: int) -> None:
    """Fault in as much memory as Argon2 will use, and give it back."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    mmap.mmap(-1, memory_kib * 1024, flags).close()


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read exactly `size` bytes, or end the process."""
    data = stream.read(size)
    if len(data) != size:
        sys.exit(0)
    return data


def main() -> None:
    """Serve requests until end of file."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    os.write(answers.fileno(), STARTED)
    (memory_kib,) = struct.unpack("<I", _read(requests, 4))
    _confine(memory_kib)
    _touch(memory_kib)
    os.write(answers.fileno(), READY)
    while True:
        kib, passes, salt, size = REQUEST.unpack(_read(requests, REQUEST.size))
        kdf = Argon2id(
            salt=salt, length=SECRET_SIZE, iterations=passes, lanes=LANES, memory_cost=kib
        )
        os.write(answers.fileno(), kdf.derive(_read(requests, size)))


if __name__ == "__main__":
    main()
