"""Volume header: strict parser, one failure to unlock, crash-safe replacement of two copies."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from encfsd import errors, keys, volume_header
from encfsd.keys import Secret, SecretBytes, SecretKind, SlotType, VolumeKey
from encfsd.volume_header import COPIES, HEADER_SIZE, Copies, Header, HeaderId

PARSE_ERRORS = (errors.NotAVolume, errors.NewerFormat, errors.DamagedHeader)


def key_file(letter: str) -> Secret:
    return Secret(SecretKind.RANDOM, SecretBytes(letter.encode() * 32))


def passphrase(text: str) -> Secret:
    return Secret(SecretKind.PASSPHRASE, SecretBytes(text.encode()))


@cache
def volume() -> tuple[Header, bytes]:
    """Return a header opened by key file "a" only, and its VK."""
    header, key = volume_header.create(key_file("a"), SlotType.KEY_FILE)
    return header, bytes(key.key)


def volume_key() -> VolumeKey:
    header, key = volume()
    return VolumeKey(header.volume_id, SecretBytes(key), 0)


def patched(raw: bytes, offset: int, data: bytes) -> bytes:
    return raw[:offset] + data + raw[offset + len(data) :]


# Parser


def test_sizes_are_those_of_the_specification() -> None:
    header, _ = volume()
    assert len(header.raw) == 4096
    assert header.raw[:8] == b"ENCVOL\x01\x00"
    assert header.raw[16:32] == header.volume_id
    assert header.raw[64:68] == b"\x02\0\0\0"  # slot 0: key file
    assert header.raw[64 + 128 : 4064] == bytes(4064 - 192)


def test_parse_and_build_are_inverse() -> None:
    header, _ = volume()
    parsed = volume_header.parse(header.raw)
    assert parsed == header
    assert volume_header.build(volume_key(), parsed.generation, parsed.slots) == header


@given(st.binary(max_size=HEADER_SIZE + 64))
@example(b"")
@example(b"ENCVOL")
@example(b"ENCVOL\x01")
@example(b"ENCVOL\x01\x00" + bytes(HEADER_SIZE - 8))
def test_no_input_raises_anything_but_the_defined_errors(raw: bytes) -> None:
    with pytest.raises(PARSE_ERRORS):
        volume_header.parse(raw)


@given(st.lists(st.tuples(st.integers(8, 4063), st.integers(0, 255)), min_size=1, max_size=6))
def test_no_change_of_a_header_raises_anything_but_the_defined_errors(
    changes: list[tuple[int, int]],
) -> None:
    header, _ = volume()
    raw = bytearray(header.raw)
    for offset, value in changes:
        raw[offset] = value
    try:
        parsed = volume_header.parse(bytes(raw))
    except PARSE_ERRORS:
        return
    key = VolumeKey(parsed.volume_id, SecretBytes(32), 0)
    again = volume_header.build(key, parsed.generation, parsed.slots)
    assert again.raw[:4064] == raw[:4064]  # nothing was overlooked


def test_each_flipped_byte_is_refused() -> None:
    header, _ = volume()
    refused: Counter[type[BaseException]] = Counter()
    for offset in range(HEADER_SIZE):
        raw = patched(header.raw, offset, bytes([header.raw[offset] ^ 0x01]))
        with pytest.raises(errors.EncfsdError) as caught:
            volume_header.unlock(volume_header.parse(raw), key_file("a"))
        refused[caught.type] += 1
    assert refused[errors.NotAVolume] == 6
    assert refused[errors.NewerFormat] == 1
    # Generation, volume id, the slot's salt, commitment and wrapped key, the MAC. (Bit 0 of the
    # type makes a credential of a key file: only the slot hash notices.)
    assert refused[errors.UnlockFailed] == 8 - 1 + 16 + 32 + 32 + 48 + 32 + 1


@pytest.mark.parametrize(
    ("offset", "data", "error", "detail"),
    [
        (0, b"x", errors.NotAVolume, ""),
        (6, b"\x02\x00", errors.NewerFormat, "format 2"),
        (6, b"\xff\xff", errors.NewerFormat, "format 65535"),
        (6, b"\x00\x00", errors.DamagedHeader, "format 0"),
        (8, bytes(8), errors.DamagedHeader, "generation 0"),
        (32, b"\x01", errors.DamagedHeader, "reserved byte"),
        (63, b"\x01", errors.DamagedHeader, "reserved byte"),
        (2112, b"\x01", errors.DamagedHeader, "reserved byte"),
        (4063, b"\x01", errors.DamagedHeader, "reserved byte"),
        (64, bytes(128), errors.DamagedHeader, "no key slot"),
        (64, b"\x05", errors.DamagedHeader, "slot 0 has unknown type 5"),
        (64, b"\x00", errors.DamagedHeader, "free key slot 0 is not zero"),
        (76, b"\x01", errors.DamagedHeader, "reserved byte of key slot 0"),
        (68, b"\x01", errors.DamagedHeader, "slot 0 has a KDF cost out of bounds"),
        (72, b"\x01", errors.DamagedHeader, "slot 0 has a KDF cost out of bounds"),
        (64 + 15 * 128 + 127, b"\x01", errors.DamagedHeader, "free key slot 15 is not zero"),
    ],
)
def test_what_a_reader_refuses(
    offset: int, data: bytes, error: type[errors.EncfsdError], detail: str
) -> None:
    header, _ = volume()
    with pytest.raises(error) as caught:
        volume_header.parse(patched(header.raw, offset, data))
    assert detail in caught.value.detail


@pytest.mark.parametrize("size", [8, 4095, 4097])
def test_other_sizes_are_refused(size: int) -> None:
    header, _ = volume()
    with pytest.raises(errors.DamagedHeader, match=f"{size} bytes"):
        volume_header.parse((header.raw + b"\0")[:size])


@pytest.mark.parametrize(("kib", "passes"), [(65535, 3), (65536, 2), (4194305, 3), (65536, 33)])
def test_passphrase_slot_out_of_bounds_is_refused_before_any_work(kib: int, passes: int) -> None:
    header, _ = volume()
    cost = b"".join(n.to_bytes(4, "little") for n in (1, kib, passes))
    with pytest.raises(errors.DamagedHeader, match="out of bounds"):
        volume_header.parse(patched(header.raw, 64, cost))


# Vectors

VECTORS = sorted((Path(__file__).parents[1] / "vectors" / "header").glob("*.json"))


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vectors(path: Path) -> None:
    known = json.loads(path.read_text())
    raw = bytearray(known["size"])
    for offset, line in known["parts"].items():
        raw[int(offset) : int(offset) + len(line) // 2] = bytes.fromhex(line)
    kind = SlotType(known["secret_type"]).secret_kind
    secret = Secret(kind, SecretBytes.fromhex(known["secret"]))
    if known["expect"] == "success":
        with volume_header.unlock(volume_header.parse(bytes(raw)), secret) as key:
            assert bytes(key.key).hex() == known["volume_key"]
    elif known["expect"] == "UnlockFailed":
        header = volume_header.parse(bytes(raw))  # nothing is wrong before the secret is used
        with pytest.raises(errors.UnlockFailed):
            volume_header.unlock(header, secret)
    else:
        with pytest.raises(getattr(errors, known["expect"])):
            volume_header.parse(bytes(raw))


# Unlock and change


def test_unlock_returns_the_key_and_which_slot_opened_it() -> None:
    header, vk = volume()
    both = volume_header.add_slot(header, volume_key(), key_file("b"), SlotType.TPM, 2)
    assert both.generation == 2
    assert both.slots[1].type is SlotType.TPM
    for letter, slot in (("a", 0), ("b", 1)):
        with volume_header.unlock(both, key_file(letter)) as key:
            assert bytes(key.key) == vk
            assert key.slot == slot


def test_every_failure_to_unlock_looks_the_same() -> None:
    header, _ = volume()
    wrong_mac = patched(header.raw, 4064, bytes(32))
    wrong_wrap = patched(header.raw, 64 + 80, bytes(48))
    failures = []
    for raw, secret in (
        (header.raw, key_file("x")),
        (header.raw, passphrase("no passphrase slot at all")),
        (wrong_mac, key_file("a")),
        (wrong_wrap, key_file("a")),
    ):
        with pytest.raises(errors.UnlockFailed) as caught:
            volume_header.unlock(volume_header.parse(raw), secret, "/srv/vault")
        error = caught.value
        failures.append((str(error), error.exit_code, error.__cause__, error.__context__))
    assert len(set(failures)) == 1
    assert failures[0][2:] == (None, None)


def test_passphrase_slot_opens_and_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cheapest = keys.KdfParameters(keys.MIN_MEMORY_KIB, keys.MIN_PASSES)
    monkeypatch.setattr(keys, "choose_kdf_parameters", lambda: cheapest)
    with_old = volume_header.add_slot(
        volume()[0], volume_key(), passphrase("old"), SlotType.PASSPHRASE, 2
    )
    with_new = volume_header.change_passphrase(with_old, volume_key(), 1, passphrase("new"), 3)
    assert with_new.slots[0] == with_old.slots[0]
    assert with_new.slots[1].salt != with_old.slots[1].salt
    with volume_header.unlock(with_new, passphrase("new")) as key:
        assert (bytes(key.key), key.slot) == (volume()[1], 1)
    with pytest.raises(errors.UnlockFailed):
        volume_header.unlock(with_new, passphrase("old"))


def test_removed_slot_no_longer_opens_and_leaves_only_zeros() -> None:
    both = volume_header.add_slot(volume()[0], volume_key(), key_file("b"), SlotType.KEY_FILE, 2)
    left = volume_header.remove_slot(both, volume_key(), 0, 3)
    assert left.raw[64 : 64 + 128] == bytes(128)
    with pytest.raises(errors.UnlockFailed):
        volume_header.unlock(left, key_file("a"))
    with volume_header.unlock(left, key_file("b")) as key:
        assert key.slot == 1


def test_last_slot_stays() -> None:
    with pytest.raises(errors.KeySlotRefused, match="nothing else opens the volume"):
        volume_header.remove_slot(volume()[0], volume_key(), 0, 2)


@pytest.mark.parametrize("index", [1, 15, 16, -1])
def test_free_slot_cannot_be_removed(index: int) -> None:
    with pytest.raises(errors.KeySlotRefused, match="not in use"):
        volume_header.remove_slot(volume()[0], volume_key(), index, 2)


def test_key_file_slot_has_no_passphrase_to_change() -> None:
    with pytest.raises(errors.KeySlotRefused, match="holds no passphrase"):
        volume_header.change_passphrase(volume()[0], volume_key(), 0, passphrase("x"), 2)


def test_sixteen_slots_and_no_more() -> None:
    header = volume()[0]
    for n in range(15):
        header = volume_header.add_slot(
            header, volume_key(), key_file(chr(98 + n)), SlotType.KEY_FILE, n + 2
        )
    volume_header.unlock(header, key_file("p")).wipe()
    with pytest.raises(errors.KeySlotRefused, match="all 16"):
        volume_header.add_slot(header, volume_key(), key_file("z"), SlotType.KEY_FILE, 17)


# Two copies in a directory


@pytest.fixture(name="directory")
def open_directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    volume_header.write_first(fd, "/srv/vault", volume()[0])
    yield fd
    os.close(fd)


def put(tmp_path: Path, *raw: bytes | None) -> None:
    for name, data in zip(COPIES, raw, strict=True):
        if data is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(data)


def read(directory: int) -> Copies:
    return volume_header.read_copies(directory, "/srv/vault")


def test_both_copies_are_private_and_alike(tmp_path: Path, directory: int) -> None:
    for name in COPIES:
        assert (tmp_path / name).read_bytes() == volume()[0].raw
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o600
    assert sorted(os.listdir(tmp_path)) == sorted(COPIES)
    assert not read(directory).need_repair(volume()[0])


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("contents", [None, b"", b"\xff" * 4096])
def test_one_damaged_copy_is_reported_and_the_other_used(
    tmp_path: Path,
    directory: int,
    damaged: int,
    contents: bytes | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    raw: list[bytes | None] = [volume()[0].raw] * 2
    raw[damaged] = contents
    put(tmp_path, *raw)
    copies = read(directory)
    assert list(copies.problems) == [COPIES[damaged]]
    assert f"/srv/vault/{COPIES[damaged]}: volume header damaged" in caplog.text
    assert copies.need_repair(volume()[0])
    header, key = volume_header.open_copies(copies, key_file("a"), lambda _: {volume()[0].id})
    key.wipe()
    volume_header.replace(copies, header, header, lambda _: None, lambda _: None)
    assert not read(directory).need_repair(header)


def test_directory_without_header_is_not_a_volume(tmp_path: Path, directory: int) -> None:
    put(tmp_path, None, None)
    with pytest.raises(errors.NotAVolume, match=r"^/srv/vault: "):
        read(directory)


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (b"junk", None, errors.DamagedHeader),
        (None, b"", errors.DamagedHeader),
        (b"junk", b"ENCVOL\x02\x00", errors.NewerFormat),
    ],
)
def test_no_usable_copy(
    tmp_path: Path,
    directory: int,
    first: bytes | None,
    second: bytes | None,
    error: type[errors.EncfsdError],
) -> None:
    put(tmp_path, first, second)
    with pytest.raises(error):
        read(directory)


def test_planted_files_are_refused_and_never_followed(tmp_path: Path, directory: int) -> None:
    path = tmp_path / COPIES[0]
    (tmp_path / "elsewhere").write_bytes(path.read_bytes())
    plants: list[Callable[[], object]] = [
        lambda: path.symlink_to("elsewhere"),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.hardlink_to(tmp_path / "elsewhere"),
    ]
    for plant in plants:
        path.unlink()
        plant()
        with pytest.raises(errors.BackingInsecure, match=COPIES[0]):
            read(directory)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
            path.touch()


def test_header_that_others_can_write_is_refused(tmp_path: Path, directory: int) -> None:
    (tmp_path / COPIES[1]).chmod(0o620)
    with pytest.raises(errors.BackingInsecure, match="others can write"):
        read(directory)


def test_temporary_file_left_or_planted_is_replaced_not_followed(
    tmp_path: Path, directory: int
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / (COPIES[0] + ".new")).symlink_to(victim)
    volume_header.write_first(directory, "/srv/vault", volume()[0])
    assert victim.read_text() == "precious"
    assert not (tmp_path / COPIES[0]).is_symlink()


# Which copy counts


def next_headers() -> tuple[Header, Header, Header]:
    """Return generations 1 (opened by a), 2 (by a and b), 3 (by b)."""
    one = volume()[0]
    two = volume_header.add_slot(one, volume_key(), key_file("b"), SlotType.KEY_FILE, 2)
    return one, two, volume_header.remove_slot(two, volume_key(), 0, 3)


def open_with(directory: int, letter: str, accepted: Collection[Header]) -> int:
    header, key = volume_header.open_copies(
        read(directory), key_file(letter), lambda _: {header.id for header in accepted}
    )
    assert bytes(key.key) == volume()[1]
    key.wipe()
    return header.generation


def test_highest_accepted_copy_counts(tmp_path: Path, directory: int) -> None:
    one, two, three = next_headers()
    put(tmp_path, one.raw, two.raw)
    assert open_with(directory, "a", [one, two]) == 2
    assert open_with(directory, "a", [one]) == 1
    put(tmp_path, three.raw, two.raw)
    assert open_with(directory, "b", [two, three]) == 3
    # "a" opens only generation 2, which is still accepted: the change to 3 goes on from here.
    assert open_with(directory, "a", [two, three]) == 3


def test_removed_secret_is_of_no_use_with_an_old_copy(tmp_path: Path, directory: int) -> None:
    _, two, three = next_headers()
    put(tmp_path, three.raw, two.raw)
    assert open_with(directory, "b", [three]) == 3
    with pytest.raises(errors.HeaderNotAccepted):
        open_with(directory, "a", [three])
    put(tmp_path, two.raw, two.raw)
    with pytest.raises(errors.HeaderNotAccepted):
        open_with(directory, "b", [three])


def test_same_generation_with_other_contents_is_another_header(
    tmp_path: Path, directory: int
) -> None:
    one, two, _ = next_headers()
    other = volume_header.add_slot(one, volume_key(), key_file("c"), SlotType.KEY_FILE, 2)
    put(tmp_path, other.raw, other.raw)
    with pytest.raises(errors.HeaderNotAccepted):
        open_with(directory, "a", [two])


def test_copy_that_is_not_authentic_counts_for_nothing(tmp_path: Path, directory: int) -> None:
    one, two, _ = next_headers()
    forged = volume_header.parse(patched(two.raw, 8, (2**64 - 1).to_bytes(8, "little")))
    put(tmp_path, forged.raw, one.raw)
    assert open_with(directory, "a", [one, forged]) == 1
    assert read(directory).next_generation(volume_key()) == 2
    with pytest.raises(errors.UnlockFailed):
        open_with(directory, "b", [one, forged])


def test_key_is_wiped_when_object_0_cannot_be_opened(directory: int) -> None:
    seen: list[VolumeKey] = []

    def accepted(key: VolumeKey) -> Collection[HeaderId]:
        seen.append(key)
        raise errors.BackingGone("meta")

    with pytest.raises(errors.BackingGone):
        volume_header.open_copies(read(directory), key_file("a"), accepted)
    assert bytes(seen[0].key) == bytes(32)


def test_accepted_headers_are_kept_as_40_bytes_each() -> None:
    one, two, _ = next_headers()
    value = volume_header.pack_ids({two.id, one.id})
    assert value == bytes([1, *bytes(7)]) + one.id.digest + bytes([2, *bytes(7)]) + two.id.digest
    assert volume_header.unpack_ids(value) == {one.id, two.id}
    assert volume_header.unpack_ids(value[:40]) == {one.id}


@pytest.mark.parametrize("size", [0, 39, 41, 79, 81, 120])
def test_other_values_are_refused(size: int) -> None:
    with pytest.raises(errors.DamagedContents):
        volume_header.unpack_ids(bytes(size))


# Crash points of a header change


class Crash(BaseException):
    """The process dies here."""


class Machine:
    """Object 0, the state record, and a countdown of steps until the crash."""

    def __init__(self, header: Header) -> None:
        self.accepted: set[HeaderId] = {header.id}
        self.remembered = header.id
        self.steps_left = 10**6

    def step(self) -> None:
        if self.steps_left == 0:
            raise Crash
        self.steps_left -= 1

    def accept(self, names: Collection[HeaderId]) -> None:
        self.step()
        self.accepted = set(names)

    def remember(self, name: HeaderId) -> None:
        self.step()
        self.remembered = name


@pytest.fixture(name="machine")
def crashing_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine on which each system call that replaces a file is a step."""
    machine = Machine(volume()[0])

    def stepping(name: str) -> None:
        real = getattr(os, name)

        def call(*args: object, **kwargs: object) -> object:
            machine.step()
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    for name in ("unlink", "write", "fsync", "rename"):
        stepping(name)
    return machine


def crash_in_change(
    tmp_path: Path, directory: int, machine: Machine, new: Header, steps: int
) -> bool:
    """Change the first header to `new`, crash after `steps`; return whether it got through."""
    old = volume()[0]
    put(tmp_path, old.raw, old.raw)
    machine.accepted, machine.remembered, machine.steps_left = {old.id}, old.id, steps
    try:
        volume_header.replace(read(directory), old, new, machine.accept, machine.remember)
    except Crash:
        return False
    finally:
        machine.steps_left = 10**6
    return True


def opens(directory: int, machine: Machine, letter: str) -> Header | None:
    try:
        header, key = volume_header.open_copies(
            read(directory), key_file(letter), lambda _: machine.accepted
        )
    except errors.UnlockFailed:
        return None
    key.wipe()
    return header


def test_every_crash_point_of_a_header_change_opens(
    tmp_path: Path, directory: int, machine: Machine
) -> None:
    _, added, removed = next_headers()
    # Replace the only secret "a" by "b" in one change: the hardest case.
    swapped = volume_header.build(volume_key(), 2, removed.slots)
    for new, always in ((added, "a"), (swapped, None)):
        steps = 0
        done = False
        generations = []
        while not done:
            done = crash_in_change(tmp_path, directory, machine, new, steps)
            headers = [h for h in (opens(directory, machine, x) for x in "ab") if h]
            assert headers, f"nothing opens after {steps} steps"
            assert all(header.id in machine.accepted for header in headers)
            assert machine.remembered.generation <= headers[0].generation
            if always is not None:
                assert opens(directory, machine, always) is not None
            generations.append(headers[0].generation)

            # The next mount finishes what was begun, with whatever opened.
            volume_header.replace(
                read(directory), headers[0], headers[0], machine.accept, machine.remember
            )
            assert machine.accepted == {headers[0].id}
            assert machine.remembered == headers[0].id
            assert not read(directory).need_repair(headers[0])
            steps += 1
        assert generations == sorted(generations)
        assert set(generations) == {1, 2}
        # accept, (unlink, write, fsync, rename, fsync) twice, accept, remember.
        assert steps - 1 == 13


def test_second_change_after_a_crash_keeps_the_current_copy_to_the_last(
    tmp_path: Path, directory: int, machine: Machine
) -> None:
    """Of an interrupted change, a copy is left that nothing accepts: it must be replaced first."""
    one, two, _ = next_headers()
    both = volume_header.add_slot(one, volume_key(), key_file("c"), SlotType.KEY_FILE, 3)
    third = volume_header.remove_slot(both, volume_key(), 0, 3)  # opened by c only
    for layout in ((one, two), (two, one)):
        for steps in range(14):
            put(tmp_path, layout[0].raw, layout[1].raw)
            machine.accepted, machine.steps_left = {one.id}, steps
            copies = read(directory)
            assert copies.next_generation(volume_key()) == 3
            with contextlib.suppress(Crash):
                volume_header.replace(copies, one, third, machine.accept, machine.remember)
            machine.steps_left = 10**6
            # Steps 5 and 10 are the two renames.
            assert (opens(directory, machine, "a") is not None) == (steps < 10), steps
            assert (opens(directory, machine, "c") is not None) == (steps >= 5), steps


@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
def test_error_of_the_file_system_becomes_ours_and_damages_nothing(
    directory: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = next_headers()

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(errors.BackingFull, match=r"volume\.header"):
        volume_header.replace(read(directory), one, two, lambda _: None, lambda _: None)
    monkeypatch.undo()
    assert open_with(directory, "a", [one, two]) == 1
