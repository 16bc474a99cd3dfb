"""What is mounted where, which mount points will do, and what the helper is told."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from encfsd import mounting
from encfsd.errors import (
    AlreadyMounted,
    Exit,
    FilesOpen,
    MountPointMissing,
    MountPointNotEmpty,
    NoFuseDevice,
    NoPermission,
    NotMounted,
)
from encfsd.options import MountFlags

MOUNTINFO = [
    "22 27 0:21 / /proc rw,nosuid - proc proc rw\n",
    "42 27 0:39 / /mnt/with\\040space\\134x rw - fuse.encfsd /srv/a\\040b rw,user_id=1000,max=7\n",
    "43 27 0:40 / /mnt/a rw shared:1 master:2 - ext4 /dev/x rw,user_id_like=3\n",
]


def test_mountinfo_lines() -> None:
    entries = mounting._parse(MOUNTINFO)
    assert entries[1] == mounting.MountEntry(
        "/mnt/with space\\x", "0:39", "fuse.encfsd", "/srv/a b", 1000
    )
    assert [entry.user for entry in entries] == [0, 1000, 0]
    assert entries[2].type == "ext4"


def test_what_is_mounted_now() -> None:
    entry = mounting.mounted_at("/proc")
    assert entry is not None
    assert entry.type == "proc"
    assert mounting.mounted_at("/proc/self") is None


def test_resolve_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert mounting.resolve(str(tmp_path / "link")) == str(tmp_path / "real")
    assert mounting.resolve(f"{tmp_path}/link/../real/") == str(tmp_path / "real")
    assert mounting.resolve("/") == "/"


def test_a_good_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounting, "DEVICE", "/dev/null")
    mounting.check_mount_point(str(tmp_path))


def test_bad_mount_points(tmp_path: Path) -> None:
    with pytest.raises(MountPointMissing) as missing:
        mounting.check_mount_point(str(tmp_path / "missing"))
    assert missing.value.exit_code == Exit.MOUNT_POINT_MISSING
    (tmp_path / "file").touch()
    with pytest.raises(MountPointMissing):
        mounting.check_mount_point(str(tmp_path / "file"))
    with pytest.raises(MountPointNotEmpty) as occupied:
        mounting.check_mount_point(str(tmp_path))
    assert occupied.value.exit_code == Exit.MOUNT_POINT_NOT_EMPTY
    with pytest.raises(AlreadyMounted) as mounted:
        mounting.check_mount_point("/proc")
    assert mounted.value.exit_code == Exit.ALREADY_MOUNTED


def test_an_automount_point_will_do_and_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_forever(_: str) -> list[str]:
        raise AssertionError

    entry = mounting.MountEntry(str(tmp_path), "0:1", "autofs", "systemd-1", 0)
    monkeypatch.setattr(mounting, "DEVICE", "/dev/null")
    monkeypatch.setattr(mounting, "mounted_at", lambda _: entry)
    monkeypatch.setattr(os, "listdir", wait_forever)
    mounting.check_mount_point(str(tmp_path))


def test_no_fuse_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounting, "DEVICE", str(tmp_path / "fuse"))
    (tmp_path / "mnt").mkdir()
    with pytest.raises(NoFuseDevice) as caught:
        mounting.check_mount_point(str(tmp_path / "mnt"))
    assert caught.value.exit_code == Exit.NO_FUSE_DEVICE


def test_a_fuse_device_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NoPermission, match=r"^/dev/fuse: .* read and write /dev/fuse"):
        mounting.check_mount_point(str(tmp_path))


def test_a_mount_point_that_the_user_cannot_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(NoPermission, match="a directory of your own"):
        mounting.check_mount_point(str(tmp_path))


def test_unmounting_what_is_not_mounted(tmp_path: Path) -> None:
    with pytest.raises(NotMounted) as caught:
        mounting.unmount(str(tmp_path))
    assert caught.value.exit_code == Exit.NOT_MOUNTED


def test_what_the_helper_is_told() -> None:
    told = mounting._helper_options("/srv/a,b\\c d", MountFlags(allow_other=True))
    assert told == (
        "rw,nosuid,nodev,fsname=/srv/a\\,b\\\\c d,subtype=encfsd,"
        "default_permissions,max_read=1048576,allow_other"
    )
    told = mounting._helper_options("x", MountFlags(read_only=True, noatime=True, fast_path=False))
    assert told.startswith("ro,nosuid,nodev,noatime,fsname=x,")
    assert told.endswith(",max_read=131072")
    assert "allow_other" not in told


def test_a_helper_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoPermission, match="fuse3"):
        mounting._mount_with_helper("src", str(tmp_path), MountFlags())


def refusing_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text(f'#!/bin/sh\necho "fusermount3: {reason}" >&2\nexit 1\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")


def test_a_helper_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing_helper(monkeypatch, tmp_path, "option noatime is refused")
    with pytest.raises(NoPermission, match=r"\(option noatime is refused\); change owner"):
        mounting._mount_with_helper("src", str(tmp_path), MountFlags())
    reason = "option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf"
    refusing_helper(monkeypatch, tmp_path, reason)
    with pytest.raises(NoPermission, match=r"add the line 'user_allow_other' to /etc/fuse.conf"):
        mounting._mount_with_helper("src", str(tmp_path), MountFlags(allow_other=True))


def test_a_busy_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refusing_helper(monkeypatch, tmp_path, "failed to unmount /mnt: Device or resource busy")
    with pytest.raises(FilesOpen, match="'fuser -vm /mnt' shows who") as caught:
        mounting.unmount("/mnt")
    assert caught.value.exit_code == Exit.VOLUME_IN_USE


def bdi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make /sys/class/bdi of what MOUNTINFO shows at /mnt/a, with one setting missing."""
    folder = tmp_path / "bdi" / "0:40"
    folder.mkdir(parents=True)
    for name, value in {"read_ahead_kb": "128", "max_ratio": "20"}.items():
        (folder / name).write_text(value + "\n")
    monkeypatch.setattr(mounting, "_BDI", folder.parent)
    entry = mounting._parse(MOUNTINFO)[2]
    monkeypatch.setattr(mounting, "mounted_at", lambda _: entry)
    return folder


def test_limits_that_may_be_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = bdi(monkeypatch, tmp_path)
    assert mounting.tune("/mnt/a") == ""
    assert (folder / "read_ahead_kb").read_text() == "1024"
    assert (folder / "max_ratio").read_text() == "20\n"
    assert not (folder / "strict_limit").exists()


def test_limits_that_may_not_be_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = bdi(monkeypatch, tmp_path)
    (folder / "strict_limit").write_text("1\n")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", refuse)
        command = mounting.tune("/mnt/a")
    assert command == (f"echo 1024 >{folder}/read_ahead_kb; echo 0 >{folder}/strict_limit")
    subprocess.run(["/bin/sh", "-c", command], check=True)
    assert mounting.tune("/mnt/a") == ""


def test_the_helper_is_looked_for_before_the_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    mounting.check_helper(MountFlags())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoPermission, match="fuse3"):
        mounting.check_helper(MountFlags())
    (tmp_path / "fusermount3").touch(mode=0o755)
    mounting.check_helper(MountFlags())


@pytest.mark.parametrize(
    ("content", "allowed"),
    [
        (None, False),
        ("", False),
        ("#user_allow_other\nmount_max = 1000\n", False),
        ("mount_max = 1000\n  user_allow_other  # for everybody\n", True),
    ],
)
def test_whether_others_may_be_let_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, allowed: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/fusermount3")
    monkeypatch.setattr(mounting, "_FUSE_CONF", tmp_path / "fuse.conf")
    if content is not None:
        (tmp_path / "fuse.conf").write_text(content)
    mounting.check_helper(MountFlags())
    if allowed:
        mounting.check_helper(MountFlags(allow_other=True))
    else:
        with pytest.raises(NoPermission, match="add the line 'user_allow_other'"):
            mounting.check_helper(MountFlags(allow_other=True))
