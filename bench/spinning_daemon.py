"""encfsd with a Python thread that never sleeps, on a CPU of its own.

    spinning_daemon.py mount -f ...    (arguments of encfsd)

What is served natively must not notice it. The thread is called "spinner", so that whoever pins
the daemon to a CPU can leave it out; until then it may run anywhere.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from encfsd import cli

NAME = "spinner"


def spin() -> None:
    """Hold the interpreter lock as often as the interpreter gives it."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
    while True:
        pass


if __name__ == "__main__":
    threading.Thread(target=spin, daemon=True).start()
    sys.exit(cli.main())
