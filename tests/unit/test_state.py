"""The state record: strict, torn writes survive, and rollbacks and forks are told apart."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encfsd import errors, state
from encfsd.keys import SecretBytes, VolumeKey
from encfsd.state import Found, Freshness, Record, RootId
from encfsd.volume_header import HeaderId

VID = bytes(range(16))
KEY = VolumeKey(VID, SecretBytes(b"v" * 32), 0)
HEADER = HeaderId(3, b"\x33" * 32)


def root(epoch: int, counter: int, letter: str = "r") -> RootId:
    return RootId(epoch, counter, letter.encode() * 32)


HERE = root(2, 5)


def record(sequence: int = 1, at: RootId = HERE, *, clean: bool = False) -> Record:
    return Record(sequence, at, HEADER, clean)


# The record as bytes

U64 = st.integers(0, 2**64 - 1)
DIGEST = st.binary(min_size=32, max_size=32)
RECORDS = st.builds(
    Record,
    U64,
    st.builds(RootId, U64, U64, DIGEST),
    st.builds(HeaderId, U64, DIGEST),
    st.booleans(),
    U64,
)


@given(RECORDS)
def test_pack_and_unpack_are_inverse(any_record: Record) -> None:
    raw = state.pack(any_record, KEY)
    assert len(raw) == 192
    assert state.unpack(raw, KEY) == any_record


def test_layout_is_that_of_the_specification() -> None:
    raw = state.pack(Record(1, RootId(2, 3, b"R" * 32), HeaderId(4, b"D" * 32), True, 5), KEY)
    assert (
        raw[:160].hex()
        == (
            b"ENCSTA\x01\x00"
            b"\x01"
            + bytes(7)
            + VID
            + b"\x01"
            + bytes(7)
            + b"\x02"
            + bytes(7)
            + b"\x03"
            + bytes(7)
            + b"\x04"
            + bytes(7)
            + b"R" * 32
            + b"D" * 32
            + b"\x05"
            + bytes(31)
        ).hex()
    )
    assert raw[160:] == KEY.state_mac(raw[:160])


def test_record_matches_the_vector() -> None:
    path = Path(__file__).parents[1] / "vectors" / "keys" / "state-record.json"
    known = json.loads(path.read_text())
    raw = bytes.fromhex(known["record"])
    key = VolumeKey(bytes.fromhex(known["volume_id"]), SecretBytes.fromhex(known["volume_key"]), 0)
    expected = Record(
        known["sequence"],
        RootId(known["epoch"], known["counter"], bytes.fromhex(known["R"])),
        HeaderId(known["header_generation"], bytes.fromhex(known["header_digest"])),
        known["clean"],
        known["epoch_begun"],
    )
    assert state.unpack(raw, key) == expected
    assert state.pack(expected, key) == raw


@given(st.binary(max_size=256))
def test_unpack_takes_any_bytes(raw: bytes) -> None:
    assert state.unpack(raw, KEY) is None


def test_each_flipped_byte_is_refused() -> None:
    raw = state.pack(record(), KEY)
    for offset in range(len(raw)):
        flipped = raw[:offset] + bytes([raw[offset] ^ 1]) + raw[offset + 1 :]
        assert state.unpack(flipped, KEY) is None, offset


def test_record_of_another_volume_or_key_is_refused() -> None:
    raw = state.pack(record(), KEY)
    assert state.unpack(raw, VolumeKey(VID, SecretBytes(b"w" * 32), 0)) is None
    assert state.unpack(raw, VolumeKey(bytes(16), SecretBytes(b"v" * 32), 0)) is None


@pytest.mark.parametrize(
    ("offset", "data"),
    [(0, b"X"), (6, b"\2"), (8, b"\3"), (15, b"\x80"), (136, b"\1"), (159, b"\x80"), (16, b"X")],
)
def test_authentic_but_unknown_fields_are_refused(offset: int, data: bytes) -> None:
    body = state.pack(record(), KEY)[:160]
    body = body[:offset] + data + body[offset + 1 :]
    assert state.unpack(body + KEY.state_mac(body), KEY) is None


# The file


@pytest.fixture(name="directory")
def open_directory(tmp_path: Path) -> Iterator[state.Directory]:
    with state.Directory(tmp_path / "state") as opened:
        yield opened


def state_file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "000102030405060708090a0b0c0d0e0f.state"


def test_created_file_is_private_and_holds_the_record(
    tmp_path: Path, directory: state.Directory
) -> None:
    state.create(directory, KEY, record(clean=True))
    assert state.read(directory, KEY) == record(clean=True)
    found = state_file(tmp_path).stat()
    assert (found.st_size, found.st_mode & 0o7777) == (8192, 0o600)


def test_no_file_is_no_record(directory: state.Directory) -> None:
    assert state.read(directory, KEY) is None


def test_updates_alternate_and_the_last_counts(tmp_path: Path, directory: state.Directory) -> None:
    state.create(directory, KEY, record(1))
    for n in range(2, 6):
        before = state_file(tmp_path).read_bytes()
        newest = record(n, root(2, 5 + n))
        state.update(directory, KEY, newest)
        assert state.read(directory, KEY) == newest
        after = state_file(tmp_path).read_bytes()
        kept = slice(0, 4096) if n % 2 else slice(4096, 8192)
        assert after[kept] == before[kept]
        assert len(after) == 8192


def test_higher_sequence_counts_even_for_an_older_root(directory: state.Directory) -> None:
    state.create(directory, KEY, record(1, root(9, 9)))
    state.update(directory, KEY, record(2, root(1, 1), clean=True))
    newest = state.read(directory, KEY)
    assert newest is not None
    assert newest.root == root(1, 1)


@pytest.mark.parametrize("torn", range(0, 192, 16))
def test_torn_write_leaves_the_record_before(
    tmp_path: Path, directory: state.Directory, torn: int
) -> None:
    state.create(directory, KEY, record(1))
    state.update(directory, KEY, record(2, root(2, 6)))
    raw = bytearray(state_file(tmp_path).read_bytes())
    raw[4096 : 4096 + torn] = state.pack(record(3, root(3, 7, "s")), KEY)[:torn]
    state_file(tmp_path).write_bytes(raw)
    assert state.read(directory, KEY) == record(2, root(2, 6))


@pytest.mark.parametrize("size", [0, 191, 4096, 5000])
def test_truncated_file_never_raises(tmp_path: Path, directory: state.Directory, size: int) -> None:
    state.create(directory, KEY, record(2))  # in slot 0
    os.truncate(state_file(tmp_path), size)
    assert state.read(directory, KEY) == (record(2) if size >= 192 else None)


def test_planted_link_is_refused(tmp_path: Path, directory: state.Directory) -> None:
    directory.make()
    state_file(tmp_path).symlink_to("/etc/passwd")
    with pytest.raises(errors.StateUnusable):
        state.read(directory, KEY)
    with pytest.raises(errors.StateUnusable):
        state.update(directory, KEY, record())


def test_update_needs_the_file(directory: state.Directory) -> None:
    with pytest.raises(errors.StateUnusable, match="No such file"):
        state.update(directory, KEY, record())


# The directory


def test_directory_is_made_private_for_the_first_record_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "a" / "encfsd"
    with state.Directory(path) as opened:
        assert state.read(opened, KEY) is None
        assert not path.parent.exists()
        state.create(opened, KEY, record())
        assert path.stat().st_mode & 0o7777 == 0o700
        assert state.read(opened, KEY) == record()


def test_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    with state.Directory(tmp_path / "b") as opened:
        (tmp_path / "b").touch()
        with pytest.raises(errors.StateUnusable, match=f"^{tmp_path}/b: "):
            state.create(opened, KEY, record())


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770])
def test_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(errors.StateUnusable, match=f"its mode is 0{mode:o}"):
        state.Directory(tmp_path)


def test_symbolic_link_and_plain_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(errors.StateUnusable):
            state.Directory(tmp_path / name)


def test_directory_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(errors.StateUnusable, match=f"it belongs to user {owner}"):
        state.Directory(tmp_path)


@pytest.mark.parametrize(
    ("uid", "xdg", "expected"),
    [
        (0, "/x", "/var/lib/encfsd"),
        (1000, "/x", "/x/encfsd"),
        (1000, "", "/home/u/.local/state/encfsd"),
        (1000, "relative", "/home/u/.local/state/encfsd"),
    ],
)
def test_default_directory(
    uid: int, xdg: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setenv("XDG_STATE_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/u")
    assert state.default_directory() == Path(expected)


def test_same_device_is_seen(tmp_path: Path, directory: state.Directory) -> None:
    backing = os.open(tmp_path, os.O_RDONLY)
    assert not state.on_same_device(directory, backing)
    directory.make()
    elsewhere = os.open("/proc", os.O_RDONLY)
    assert state.on_same_device(directory, backing)
    assert not state.on_same_device(directory, elsewhere)
    os.close(backing)
    os.close(elsewhere)


# Freshness

REMEMBERED = record(1, root(2, 5))
R = b"r" * 32
OTHER_HEADER = HeaderId(3, b"\x44" * 32)


@pytest.mark.parametrize(
    ("at", "header", "ancestors", "verdict"),
    [
        (root(2, 5), HEADER, [], Freshness.FRESH),
        # The machine crashed between the barrier and the record.
        (root(2, 6, "n"), HEADER, [R], Freshness.FRESH),
        (root(3, 1, "n"), HEADER, [b"q" * 32, R], Freshness.FRESH),
        # Newer by its numbers, but not known to follow: written elsewhere from an older state.
        (root(2, 6, "n"), HEADER, [b"q" * 32], Freshness.FORKED),
        (root(9, 9, "n"), HEADER, [], Freshness.FORKED),
        (root(2, 5, "n"), HEADER, [R], Freshness.FORKED),
        (root(2, 4, "o"), HEADER, [], Freshness.OLDER),
        (root(1, 99, "o"), HEADER, [R], Freshness.OLDER),
        (root(2, 5), HeaderId(4, b"\x44" * 32), [], Freshness.FRESH),
        (root(2, 5), HeaderId(2, b"\x44" * 32), [], Freshness.OLDER),
        (root(2, 5), OTHER_HEADER, [], Freshness.FORKED),
    ],
)
def test_compare(at: RootId, header: HeaderId, ancestors: list[bytes], verdict: Freshness) -> None:
    assert state.compare(REMEMBERED, Found(at, header, ancestors)) is verdict


def test_no_record_is_its_own_verdict() -> None:
    assert state.compare(None, Found(root(2, 5), HEADER, [])) is Freshness.NO_RECORD


OLDER = Found(root(2, 4, "o"), HEADER, [])
FORKED = Found(root(2, 5, "f"), HEADER, [])


@pytest.mark.parametrize(
    ("remembered", "found", "refusal"),
    [
        (None, OLDER, errors.NoRecord),
        (REMEMBERED, OLDER, errors.OlderThanRecord),
        (REMEMBERED, FORKED, errors.ForkedFromRecord),
    ],
)
def test_only_the_named_root_is_accepted(
    remembered: Record | None, found: Found, refusal: type[errors.EncfsdError]
) -> None:
    with pytest.raises(refusal, match=f"--accept-root={found.root.salt.hex()}"):
        state.check("/srv/vault", remembered, found)
    with pytest.raises(refusal):
        state.check("/srv/vault", remembered, found, accept_root=R)
    verdict = state.check("/srv/vault", remembered, found, accept_root=found.root.salt)
    assert verdict is not Freshness.FRESH


def test_trust_first_is_only_for_the_first_time() -> None:
    assert state.check("/srv/vault", None, FORKED, trust_first=True) is Freshness.NO_RECORD
    for found, refusal in ((OLDER, errors.OlderThanRecord), (FORKED, errors.ForkedFromRecord)):
        with pytest.raises(refusal):
            state.check("/srv/vault", REMEMBERED, found, trust_first=True)


def test_refusal_names_both_roots() -> None:
    with pytest.raises(errors.OlderThanRecord) as caught:
        state.check("/srv/vault", REMEMBERED, OLDER)
    assert f"remembered root {'72' * 32} of epoch 2, counter 5" in str(caught.value)
    assert f"found root {'6f' * 32} of epoch 2, counter 4" in str(caught.value)
