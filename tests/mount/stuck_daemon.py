"""A FUSE daemon that mounts and then never answers: the worst that a test can meet.

Usage: stuck_daemon.py mount -f [options] SRC MNT
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    fuse = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    data = f"fd={fuse},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    if libc.mount(b"stuck", os.fsencode(sys.argv[-1]), b"fuse.stuck", 0, data) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    signal.pause()


main()
