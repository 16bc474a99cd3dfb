"""Derivation, slot wrapping with its commitment, and Argon2id in a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from encfsd import argon2_child, errors, keys
from encfsd.keys import (
    NO_KDF,
    KdfParameters,
    PassphraseStretcher,
    Secret,
    SecretBytes,
    SecretKind,
    Slot,
    SlotType,
)

VECTORS = Path(__file__).parents[1] / "vectors"
VID = bytes(range(16))
CHEAPEST = KdfParameters(keys.MIN_MEMORY_KIB, keys.MIN_PASSES)


def random_secret(data: bytes = b"k" * 32) -> Secret:
    return Secret(SecretKind.RANDOM, SecretBytes(data))


def wrap_random(key: bytes, secret: Secret, index: int = 0) -> Slot:
    return keys.wrap(
        SecretBytes(key),
        secret,
        volume_id=VID,
        index=index,
        kind=SlotType.KEY_FILE,
        kdf=NO_KDF,
    )


def test_known_answers_hold() -> None:
    keys.self_test()


def test_a_wrong_known_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "mac", lambda _key, _data: bytes(32))
    with pytest.raises(errors.InternalError, match="HMAC-SHA256"):
        keys.self_test()


def test_secret_bytes_are_wiped_and_not_shown() -> None:
    secret = SecretBytes(b"hunter2")
    assert "hunter2" not in f"{secret} {secret!r}"
    with secret:
        assert bytes(secret) == b"hunter2"
    assert bytes(secret) == bytes(7)


def test_derivation_separates_label_from_context() -> None:
    key = b"\1" * 32
    assert keys.derive(key, "a", b"b") != keys.derive(key, "ab")
    assert keys.derive(key, "a", b"b") != keys.derive(key, "a", b"c")
    assert len(keys.derive(key, "a")) == 32


def test_wiping_a_volume_key_wipes_what_was_derived() -> None:
    with keys.VolumeKey(VID, SecretBytes(b"v" * 32), 0) as key:
        assert any(key.prk)
    assert bytes(key.key) == bytes(32)
    assert bytes(key.prk) == bytes(32)


@pytest.mark.parametrize(
    ("memory_kib", "passes", "fits"),
    [
        (64 << 10, 3, True),
        (4 << 20, 32, True),
        ((64 << 10) - 1, 3, False),
        ((4 << 20) + 1, 3, False),
        (64 << 10, 2, False),
        (64 << 10, 33, False),
    ],
)
def test_kdf_bounds(memory_kib: int, passes: int, fits: bool) -> None:
    assert KdfParameters(memory_kib, passes).within_bounds() is fits


@pytest.mark.parametrize(
    ("total_mib", "chosen_mib"), [(256, 64), (1024, 64), (2048, 128), (65536, 256)]
)
def test_chosen_cost_follows_memory(
    total_mib: int, chosen_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"SC_PHYS_PAGES": total_mib << 8, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert keys.choose_kdf_parameters() == KdfParameters(chosen_mib << 10, 3)


# Slots


def open_one(slots: dict[int, Slot], secret: Secret, vid: bytes = VID) -> list[tuple[int, bytes]]:
    return [(index, bytes(key)) for index, key in keys.open_slots(vid, slots, secret)]


def test_slot_opens_with_its_secret_only() -> None:
    slot = wrap_random(b"v" * 32, random_secret())
    assert open_one({0: slot}, random_secret()) == [(0, b"v" * 32)]
    assert open_one({0: slot}, random_secret(b"K" * 32)) == []


def test_slot_is_bound_to_its_place_and_volume() -> None:
    slot = wrap_random(b"v" * 32, random_secret())
    assert open_one({1: slot}, random_secret()) == []
    assert open_one({0: slot}, random_secret(), vid=bytes(16)) == []


def test_each_wrapping_draws_a_fresh_salt() -> None:
    one, two = (wrap_random(b"v" * 32, random_secret()) for _ in range(2))
    assert one.salt != two.salt
    assert one.wrapped != two.wrapped


def test_random_secret_never_tries_a_passphrase_slot() -> None:
    slot = Slot(SlotType.PASSPHRASE, CHEAPEST, bytes(32), bytes(32), bytes(48))
    assert open_one({0: slot}, random_secret()) == []


def test_wrapping_refuses_a_secret_of_another_kind() -> None:
    with pytest.raises(errors.InternalError):
        keys.wrap(
            SecretBytes(32),
            random_secret(),
            volume_id=VID,
            index=0,
            kind=SlotType.PASSPHRASE,
            kdf=CHEAPEST,
        )


# Vectors


def vector(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((VECTORS / "keys" / f"{name}.json").read_text())
    return loaded


@pytest.mark.parametrize("name", ["derive-header", "derive-freshness", "derive-object-0"])
def test_derivation_matches_the_vectors(name: str) -> None:
    known = vector(name)
    out = keys.derive(bytes.fromhex(known["key"]), known["label"], bytes.fromhex(known["context"]))
    assert bytes(out).hex() == known["output"]


def test_extraction_matches_the_vector() -> None:
    known = vector("extract-volume-key")
    salt, material = bytes.fromhex(known["salt"]), bytes.fromhex(known["material"])
    assert bytes(keys.extract(salt, material)).hex() == known["output"]
    assert bytes(keys.VolumeKey(salt, SecretBytes(material), 0).prk).hex() == known["output"]


def slot_of(known: dict[str, Any]) -> Slot:
    return Slot(
        SlotType(known["type"]),
        KdfParameters(known["memory_kib"], known["passes"]),
        bytes.fromhex(known["salt"]),
        bytes.fromhex(known["COM"]),
        bytes.fromhex(known["wrapped"]),
    )


@pytest.mark.parametrize("name", ["slot-passphrase", "slot-key-file"])
def test_slots_match_the_vectors(name: str) -> None:
    known = vector(name)
    slot = slot_of(known)
    vid, index = bytes.fromhex(known["volume_id"]), known["index"]
    assert keys.slot_hash(vid, index, slot.type, slot.kdf, slot.salt).hex() == known["SH"]
    secret = Secret(slot.type.secret_kind, SecretBytes.fromhex(known["secret"]))
    assert open_one({index: slot}, secret, vid) == [(index, bytes.fromhex(known["volume_key"]))]


def test_slot_crafted_for_two_secrets_fails_through_the_commitment() -> None:
    known = vector("slot-crafted-for-two-secrets")
    slot, bound = slot_of(known), bytes.fromhex(known["SH"])
    for kek in (known["KEK"], known["other_KEK"]):  # AES-GCM alone falls for it
        assert len(AESGCM(bytes.fromhex(kek)).decrypt(bytes(12), slot.wrapped, bound)) == 32

    mine, other = SecretBytes.fromhex(known["S"]), SecretBytes.fromhex(known["other_S"])
    assert keys.unwrap(slot, bound, mine) is not None
    assert keys.unwrap(slot, bound, other) is None
    # And it is the commitment that stops it: with the other secret's, the roles are reversed.
    commitment = bytes(keys.derive(other, "slot-commit", bound))
    reversed_roles = replace(slot, commitment=commitment)
    assert keys.unwrap(reversed_roles, bound, mine) is None
    assert keys.unwrap(reversed_roles, bound, other) is not None


def test_the_worked_example_shows_the_vectors() -> None:
    document = (VECTORS.parents[1] / "docs" / "format-keys.md").read_text()
    values = [vector("extract-volume-key")["output"]]
    values += [vector(f"derive-{name}")["output"] for name in ("header", "freshness", "object-0")]
    for name in ("slot-passphrase", "slot-key-file"):
        values += [vector(name)[field] for field in ("SH", "S", "COM", "KEK", "wrapped")]
    values += [vector("state-record")["record"][320:]]
    assert [value for value in values if f" {value}\n" not in document] == []


def test_generator_still_writes_these_vectors(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, VECTORS / "make_key_vectors.py", tmp_path], check=True, timeout=60
    )
    for folder in ("keys", "header"):
        made = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
        kept = {path.name: path.read_text() for path in (VECTORS / folder).iterdir()}
        assert made == kept


# Argon2id in its child


def test_child_computes_argon2id_for_slot_after_slot() -> None:
    with PassphraseStretcher(CHEAPEST.memory_kib) as stretcher:
        for salt in (b"s" * 32, b"t" * 32):
            expected = Argon2id(
                salt=salt, length=32, iterations=3, lanes=1, memory_cost=CHEAPEST.memory_kib
            ).derive(b"correct horse")
            out = stretcher.stretch(SecretBytes(b"correct horse"), salt, CHEAPEST)
            assert out is not None
            assert bytes(out) == expected


def test_child_keeps_secrets_out_of_its_arguments_and_core_dumps() -> None:
    with PassphraseStretcher(CHEAPEST.memory_kib) as stretcher:
        pid = stretcher._child.pid
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1]
        assert command == [b"-P", os.fsencode(os.path.realpath(argon2_child.__file__))]
        limits = Path(f"/proc/{pid}/limits").read_text()
        core = next(line for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"]


def test_child_has_bounded_memory() -> None:
    with PassphraseStretcher(CHEAPEST.memory_kib) as stretcher:
        greedy = KdfParameters(512 << 10, 3)
        assert stretcher.stretch(SecretBytes(b"x"), bytes(32), greedy) is None


def test_too_little_memory_shows_before_the_secret_is_used() -> None:
    with pytest.raises(errors.NotEnoughMemory, match="4194303 MiB"):
        PassphraseStretcher(2**32 - 1)


def test_child_that_cannot_start_is_not_taken_for_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(argon2_child, "__file__", "/nowhere/argon2_child.py")
    with pytest.raises(errors.InternalError, match="does not start"):
        PassphraseStretcher(CHEAPEST.memory_kib)


def test_killed_child_gives_no_key_and_no_exception() -> None:
    with PassphraseStretcher(CHEAPEST.memory_kib) as stretcher:
        os.kill(stretcher._child.pid, signal.SIGKILL)
        assert stretcher.stretch(SecretBytes(b"x"), bytes(32), CHEAPEST) is None


def test_child_is_gone_afterwards() -> None:
    with PassphraseStretcher(CHEAPEST.memory_kib) as stretcher:
        pid = stretcher._child.pid
    assert not os.path.exists(f"/proc/{pid}")
