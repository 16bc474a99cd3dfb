"""Volumes in /etc/fstab: mount(8) and umount(8) run the helpers, and wait as they should.

Both look for helpers in /sbin only. The tests put them there in a mount namespace of their own, so
that nothing is left on the machine; whatever runs in it dies with it.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.mount.harness import Volume, run

ROOT = Path(__file__).parents[2]
GENERATOR = Path("/usr/lib/systemd/system-generators/systemd-fstab-generator")
HELPERS = {"mount.encfsd": "mount", "umount.fuse.encfsd": "umount"}

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)


class Machine:
    """A machine on which the helpers are installed, and whose fstab has one line."""

    def __init__(self, folder: Path, volume: Volume) -> None:
        self._sbin = folder / "sbin"
        self._sbin.mkdir()
        for name, function in HELPERS.items():
            script = self._sbin / name
            script.write_text(
                f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                f"from encfsd.mount_helper import {function}\nsys.exit({function}())\n"
            )
            script.chmod(0o755)
        self._volume = volume
        self._fstab = folder / "fstab"

    def fstab(self, options: str = "") -> None:
        volume = self._volume
        secret, state = (option.removeprefix("--") for option in volume.unlock)
        words = f"nofail,x-systemd.automount,{secret},{state},log-file={volume.log}{options}"
        self._fstab.write_text(f"{volume.source} {volume.point} encfsd {words} 0 0\n")

    def sh(self, script: str) -> list[str]:
        """Run a script with $fstab, $src, $mnt; return the lines that it prints.

        Where the script ends, everything that it has started and mounted ends.
        """
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        prologue = 'mount --bind "$sbin" /sbin\n'
        environment = {
            **os.environ,
            "sbin": str(self._sbin),
            "fstab": str(self._fstab),
            "src": str(self._volume.source),
            "mnt": str(self._volume.point),
        }
        result = run([*apart, "sh", "-euc", prologue + script], env=environment)
        return result.stdout.splitlines()


@pytest.fixture
def machine(tmp_path: Path, volume: Volume) -> Machine:
    made = Machine(tmp_path, volume)
    made.fstab()
    return made


def test_mount_returns_when_usable_and_umount_when_durable(
    machine: Machine, volume: Volume
) -> None:
    assert machine.sh("""
        mount -T "$fstab" "$mnt"
        findmnt -no FSTYPE,SOURCE "$mnt"
        echo kept >"$mnt/file"
        umount "$mnt"
        pgrep -f "encfsd $src" || echo gone
    """) == [f"fuse.encfsd {volume.source}", "gone"]
    assert "everything is durable" in volume.log.read_text()
    assert machine.sh('mount -T "$fstab" "$mnt"; cat "$mnt/file"; umount "$mnt"') == ["kept"]


def test_mount_all_mounts_what_is_not_mounted(machine: Machine) -> None:
    assert machine.sh("""
        mount -a -T "$fstab"
        mount -a -T "$fstab"
        grep -c " $mnt " /proc/self/mounts
        umount "$mnt"
    """) == ["1"]


def test_options_reach_the_mount(machine: Machine) -> None:
    machine.fstab(",free-list=7M,noauto,ro,noexec,allow_other,user,_netdev")
    assert machine.sh("""
        mount -a -T "$fstab"
        findmnt "$mnt" || echo not yet
        mount -T "$fstab" "$mnt"
        grep " $mnt " /proc/self/mounts | cut -d' ' -f4 | tr , '\n' |
            grep -xE 'ro|noexec|nosuid|nodev|allow_other' | sort | tr '\n' ' '
        umount "$mnt"
    """) == ["not yet", "allow_other nodev noexec nosuid ro "]


def test_without_fstab_and_on_the_command_line(machine: Machine, volume: Volume) -> None:
    options = ",".join(option.removeprefix("--") for option in volume.unlock)
    assert machine.sh(f"""
        mount -t encfsd -o {options} "$src" "$mnt"
        umount -l "$mnt"
        findmnt "$mnt" || echo detached
    """) == ["detached"]


def test_failures_have_the_codes_of_mount(machine: Machine, volume: Volume) -> None:
    code = 'mount -T "$fstab" "$mnt" 2>&1 || echo $?'
    machine.fstab(",passphrase=hunter2")
    said, status = machine.sh(code)
    assert said.startswith("encfsd: -o passphrase: not valid (unknown mount option)")
    assert status == "1"
    machine.fstab(",volume-id=" + 32 * "0")
    said, status = machine.sh(code)
    assert "holds another volume" in said
    assert status == "32"
    machine.fstab()
    (volume.point / "occupied").touch()
    assert machine.sh(code)[-1] == "32"
    (volume.point / "occupied").unlink()
    assert machine.sh("""
        mount -T "$fstab" "$mnt"
        mount -T "$fstab" -o remount,ro "$mnt" 2>/dev/null || echo $?
        (cd "$mnt"; umount "$mnt" 2>/dev/null || echo $?)
        umount "$mnt"
    """) == ["1", "32"]


@pytest.mark.skipif(not GENERATOR.exists(), reason="needs systemd")
def test_systemd_mounts_it_at_boot(machine: Machine, volume: Volume, tmp_path: Path) -> None:
    machine.fstab(",x-systemd.requires=network.target")
    units = tmp_path / "units"
    units.mkdir()
    environment = {**os.environ, "SYSTEMD_FSTAB": str(tmp_path / "fstab")}
    run([GENERATOR, units, units, units], env=environment)
    unit = next(units.glob("*.mount")).read_text().splitlines()
    assert {f"What={volume.source}", f"Where={volume.point}", "Type=encfsd"} <= set(unit)
    assert any(line.startswith("Options=nofail,") for line in unit)
    assert "Requires=network.target" in unit
    assert list(units.glob("*.automount"))
