"""What the figures come from: the machine, its kernel, the revision, and how busy it was."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def output_of(*command: str) -> str:
    """Run a command that may not exist; return its output."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip()


def machine(disk: Path) -> dict[str, object]:
    """Describe the machine, above all how busy it is with other things."""
    facts = dict(line.split(":", 1) for line in output_of("lscpu").splitlines() if ":" in line)
    return {
        "cpu": facts.get("Model name", platform.processor()).strip(),
        "cpus": os.cpu_count(),
        "vaes": "vaes" in facts.get("Flags", ""),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": output_of("cc", "--version").partition("\n")[0],
        "disk_file_system": output_of("findmnt", "-no", "FSTYPE,OPTIONS", "-T", str(disk)),
        "revision": output_of("git", "-C", str(HERE), "describe", "--always", "--dirty"),
        "load_average": os.getloadavg(),
    }
