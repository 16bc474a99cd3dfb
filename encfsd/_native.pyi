"""The extension that cffi makes of `_native_cdef.h`; import it through `native.py` only."""

from typing import Any

ffi: Any
lib: Any
