"""Settings of all tests.

Marks tests/mount, and skips it where there is no /dev/fuse (in CI that is a failure).
"""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tests.mount import harness

# No test depends on how fast the machine is.
settings.register_profile("encfsd", deadline=None)
settings.load_profile("encfsd")

MOUNT_TESTS = Path(__file__).parent / "mount"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the way that requests of a mount go."""
    parser.addoption(
        "--no-fast-path", action="store_true", help="mount with --no-fast-path in tests/mount"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell the harness; have programs under test heed interrupts."""
    harness.fast_path = not config.getoption("--no-fast-path")
    # Programs under test are those of this checkout.
    os.environ["PYTHONPATH"] = str(config.rootpath)
    # Whoever was started in the background by a script ignores them, and so would its children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder, so that nobody has to remember it."""
    runnable = "CI" in os.environ or os.access("/dev/fuse", os.R_OK | os.W_OK)
    for item in items:
        if item.path.is_relative_to(MOUNT_TESTS):
            item.add_marker(pytest.mark.mount)
            if not runnable:
                item.add_marker(pytest.mark.skip(reason="needs /dev/fuse"))
