"""Sizes, mount options and identifiers as users write them."""

import os
import resource

import pytest

from encfsd import options
from encfsd.errors import Exit, FreeListTooLarge, UsageError
from encfsd.options import MountFlags, format_size, parse_hex, parse_mount_flags, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1K", 1024),
        ("512M", 512 << 20),
        ("8G", 8 << 30),
        ("2t", 2 << 40),
        ("1.5G", 3 << 29),
        (" 3k ", 3072),
        ("25%", 250),
        ("0.1%", 1),
        ("100%", 1000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, whole=1000) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1 G", "1e3", "8GB", "0x10", "1,5G", "1%%", "101%"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, whole=1000)
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64.0 MiB"),
        (640 << 20, "640 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


def test_memory_limit_is_not_more_than_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < options.memory_limit() <= total


def test_address_space_is_reserved_for_all_memory_unless_that_is_limited() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert options.largest_free_list(resource.RLIM_INFINITY) == total
    assert options.largest_free_list(1 << 50) == total
    assert options.largest_free_list(64 << 20) == 32 << 20


def test_free_list_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "memory_limit", lambda: 1 << 30)
    assert options.free_list_size("1G") == 1 << 30
    assert options.free_list_size("50%") == 1 << 29
    with pytest.raises(FreeListTooLarge) as caught:
        options.free_list_size("1025M")
    assert caught.value.exit_code == Exit.FREE_LIST_TOO_LARGE
    assert "1.0 GiB" in str(caught.value)


def test_mount_flags_the_last_word_counts() -> None:
    flags = parse_mount_flags(["ro,noatime", "allow_other,relatime"], root=False)
    assert flags == MountFlags(read_only=True, noatime=False, allow_other=True)


def test_the_fast_path_is_the_default() -> None:
    assert parse_mount_flags([], root=False).fast_path
    assert not parse_mount_flags(["ro,no_fast_path"], root=False).fast_path
    assert parse_mount_flags(["no_fast_path", "fast_path"], root=False).fast_path


def test_mount_flags_default_to_nosuid_and_nodev() -> None:
    assert parse_mount_flags([], root=True) == MountFlags(suid=False, dev=False)
    assert parse_mount_flags(["suid,dev"], root=True) == MountFlags(suid=True, dev=True)


def test_only_root_may_ask_for_suid() -> None:
    with pytest.raises(UsageError, match="only root"):
        parse_mount_flags(["suid"], root=False)


def test_an_unknown_mount_option_is_named() -> None:
    with pytest.raises(UsageError, match=r"-o async.*noatime"):
        parse_mount_flags(["ro,async"], root=True)


def test_hexadecimal_identifiers() -> None:
    assert parse_hex("00ff" * 8, 16, "--volume-id") == b"\x00\xff" * 8
    for wrong in ("", "00", "zz" * 16, "00" * 17):
        with pytest.raises(UsageError, match="32 hexadecimal digits"):
            parse_hex(wrong, 16, "--volume-id")
