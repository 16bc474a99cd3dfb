"""The one door to native code.

No other module imports `encfsd._native`. The functions in `lib` are those that `_native_cdef.h`
declares. cffi releases the GIL around each call.
"""

import os
from typing import Any

from encfsd._native import ffi, lib

__all__ = ["check", "ffi", "lib"]


def check(result: Any) -> int:
    """Return `result`, or raise it as an OSError if it is a negative errno."""
    code = int(result)
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return code
