"""The command `encfsd`, whose transport cannot start the fast path, as where threads are scarce."""

import errno
import os
import sys
from typing import Any

from encfsd import cli, daemon
from encfsd.native import lib


class _Refusing:
    """The functions of the data plane, but for one that fails as its contract says."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    @staticmethod
    def transport_start(transport: Any, fuse_fd: int, options: Any, session_fd: Any) -> int:
        if options.fast_path:
            os.close(fuse_fd)
            return -errno.EAGAIN
        return int(lib.transport_start(transport, fuse_fd, options, session_fd))


setattr(daemon, "lib", _Refusing())  # noqa: B010
sys.exit(cli.main())
