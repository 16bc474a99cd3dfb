"""Derivation of keys, and wrapping of the volume key under a user's secret.

The specification is docs/format-keys.md; docs/key-table.md lists every key. All derivation is
HKDF-SHA256, all wrapping AES-256-GCM with a key that seals one message only, hence a zero nonce.

Wiping. Keys live in `SecretBytes`, a bytearray that is overwritten when its ``with`` block ends.
Python cannot promise more: the interpreter and the libraries below may have made copies
(`extract` returns immutable bytes; getpass returns a str). The process therefore refuses core
dumps, and the daemon moves its one long-lived key to locked memory in C.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from encfsd import argon2_child
from encfsd.closing import Closing
from encfsd.errors import EncfsdError, InternalError, NotEnoughMemory

KEY_SIZE = 32
VOLUME_ID_SIZE = 16
SALT_SIZE = 32
COMMITMENT_SIZE = 32
WRAPPED_SIZE = KEY_SIZE + 16
MAC_SIZE = 32

SLOT_VERSION = 1
_ZERO_NONCE = bytes(12)
_SLOT_HASH_INPUT = struct.Struct("<I16sIIII32s")


class SecretBytes(bytearray):
    """Bytes that are overwritten at the end of a ``with`` block, and never shown by repr()."""

    def wipe(self) -> None:
        """Overwrite the contents in place."""
        self[:] = bytes(len(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wipe()

    def __repr__(self) -> str:
        return f"<{len(self)} secret bytes>"

    __str__ = __repr__


# Derivation


def derive(key: bytes | bytearray, label: str, context: bytes = b"") -> SecretBytes:
    """Return F(key, label, context): 32 bytes of HKDF-Expand-SHA256."""
    info = b"encfsd/v1/" + label.encode("ascii") + b"\0" + context
    out = SecretBytes(KEY_SIZE)
    HKDFExpand(SHA256(), KEY_SIZE, info).derive_into(key, out)
    return out


def extract(salt: bytes, material: bytes | bytearray) -> SecretBytes:
    """Return HKDF-Extract-SHA256(salt, material), 32 bytes."""
    return SecretBytes(hmac.digest(salt, material, "sha256"))


def mac(key: bytes | bytearray, data: bytes | bytearray) -> bytes:
    """Return HMAC-SHA256, 32 bytes."""
    return hmac.digest(key, data, "sha256")


class VolumeKey:
    """The key of one volume: VK, and P derived from it. A context manager that wipes both.

    `slot` is the index of the key slot that opened it.
    """

    def __init__(self, volume_id: bytes, key: SecretBytes, slot: int) -> None:
        """Take over `key`, which this object wipes."""
        self.volume_id = volume_id
        self.key = key
        self.slot = slot
        self.prk = extract(volume_id, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Overwrite VK and P."""
        self.key.wipe()
        self.prk.wipe()

    def header_mac(self, data: bytes) -> bytes:
        """Return the MAC of the volume header over all bytes before it."""
        with derive(self.prk, "header") as key:
            return mac(key, data)

    def state_mac(self, data: bytes) -> bytes:
        """Return the MAC of a record in the trusted state directory."""
        with derive(self.prk, "freshness", self.volume_id) as key:
            return mac(key, data)


# Secrets that users hold


class SecretKind(enum.Enum):
    """How a secret becomes a slot secret: by Argon2id, or, being random, by HKDF-Extract."""

    PASSPHRASE = enum.auto()
    RANDOM = enum.auto()


@dataclass(frozen=True)
class Secret:
    """A passphrase or the contents of a key file. A context manager that wipes it."""

    kind: SecretKind
    data: SecretBytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.data.wipe()


@dataclass(frozen=True)
class KdfParameters:
    """Cost of Argon2id: memory in KiB and passes. Both zero where there is nothing to stretch."""

    memory_kib: int
    passes: int

    def within_bounds(self) -> bool:
        """Say whether a passphrase slot may carry this cost: neither weak nor exhausting."""
        return (
            MIN_MEMORY_KIB <= self.memory_kib <= MAX_MEMORY_KIB
            and MIN_PASSES <= self.passes <= MAX_PASSES
        )


# Compiled in, so that a header made by somebody else can neither weaken nor exhaust.
MIN_MEMORY_KIB = 64 << 10
MAX_MEMORY_KIB = 4 << 20
MIN_PASSES = 3
MAX_PASSES = 32
NO_KDF = KdfParameters(0, 0)


def choose_kdf_parameters() -> KdfParameters:
    """Return the cost for a new passphrase slot: a sixteenth of memory within 64 to 256 MiB.

    Modest, so that the same machine can still open the volume when it is busy.
    """
    total_kib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    return KdfParameters(min(max(total_kib // 16, MIN_MEMORY_KIB), 256 << 10), MIN_PASSES)


class PassphraseStretcher(Closing):
    """Runs Argon2id in a child process (see `argon2_child`); a context manager that ends it.

    Blocks; safe to leave at any time, the child is killed then.
    """

    def __init__(self, memory_kib: int) -> None:
        """Start a child for requests of up to `memory_kib`; NotEnoughMemory if it has not that."""
        self._child = subprocess.Popen(
            # -P: the modules beside the script must not shadow those of the standard library.
            [sys.executable, "-P", str(Path(argon2_child.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            self._send(struct.pack("<I", memory_kib))
            self._expect(
                argon2_child.STARTED, InternalError("Argon2id", "its process does not start")
            )
            self._expect(
                argon2_child.READY,
                NotEnoughMemory("Argon2id", f"it needs {memory_kib >> 10} MiB"),
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the child, and its memory with it."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def stretch(
        self, passphrase: SecretBytes, salt: bytes, parameters: KdfParameters
    ) -> SecretBytes | None:
        """Return Argon2id(passphrase, salt), 32 bytes, or None if the child died of it."""
        request = argon2_child.REQUEST.pack(
            parameters.memory_kib, parameters.passes, salt, len(passphrase)
        )
        self._send(request)
        self._send(passphrase)
        out = self._receive(SecretBytes(argon2_child.SECRET_SIZE))
        return out if len(out) == argon2_child.SECRET_SIZE else None

    def _expect(self, sign: bytes, otherwise: EncfsdError) -> None:
        if bytes(self._receive(SecretBytes(len(sign)))) != sign:
            raise otherwise

    def _send(self, data: bytes | bytearray) -> None:
        """Write `data`; a child that is gone shows when the answer is read."""
        with memoryview(data) as view:
            sent = 0
            while sent < len(view):
                try:
                    sent += os.write(_pipe(self._child.stdin).fileno(), view[sent:])
                except BrokenPipeError:
                    return

    def _receive(self, out: SecretBytes) -> SecretBytes:
        """Fill `out`; at end of file return it shorter."""
        got = 0
        with memoryview(out) as view:
            while got < len(view):
                count = os.readv(_pipe(self._child.stdout).fileno(), [view[got:]])
                if count == 0:
                    break
                got += count
        if got < len(out):
            out.wipe()
            del out[got:]
        return out


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise InternalError("Argon2id", "no pipe to the child process")
    return pipe


# Key slots


class SlotType(enum.IntEnum):
    """What opens a slot. All but passphrases are random and treated like key files."""

    PASSPHRASE = 1
    KEY_FILE = 2
    CREDENTIAL = 3
    TPM = 4

    @property
    def secret_kind(self) -> SecretKind:
        """The kind of secret that may open a slot of this type."""
        return SecretKind.PASSPHRASE if self is SlotType.PASSPHRASE else SecretKind.RANDOM


@dataclass(frozen=True)
class Slot:
    """One used key slot of a volume header."""

    type: SlotType
    kdf: KdfParameters
    salt: bytes
    commitment: bytes
    wrapped: bytes


def slot_hash(
    volume_id: bytes, index: int, kind: SlotType, kdf: KdfParameters, salt: bytes
) -> bytes:
    """Return SH: binds a wrapped key to its volume, its place and all parameters of its slot."""
    return hashlib.sha256(
        _SLOT_HASH_INPUT.pack(
            SLOT_VERSION, volume_id, index, kind, kdf.memory_kib, kdf.passes, salt
        )
    ).digest()


def wrap(
    key: SecretBytes,
    secret: Secret,
    *,
    volume_id: bytes,
    index: int,
    kind: SlotType,
    kdf: KdfParameters,
) -> Slot:
    """Return a slot with which `secret` opens `key`. Draws a fresh salt, so each call differs.

    Raises NotEnoughMemory if the machine has too little for `kdf`.
    """
    if secret.kind is not kind.secret_kind:
        raise InternalError("key slot", "the secret is of another kind than the slot")
    salt = os.urandom(SALT_SIZE)
    bound = slot_hash(volume_id, index, kind, kdf, salt)
    with _slot_secrets(secret, kdf.memory_kib) as slot_secret:
        stretched = slot_secret(salt, kdf)
    if stretched is None:
        raise NotEnoughMemory("Argon2id", f"it needs {kdf.memory_kib >> 10} MiB")
    with stretched, derive(stretched, "slot-wrap", bound) as kek:
        commitment = bytes(derive(stretched, "slot-commit", bound))
        wrapped = AESGCM(kek).encrypt(_ZERO_NONCE, key, bound)
    return Slot(kind, kdf, salt, commitment, wrapped)


def unwrap(slot: Slot, bound: bytes, slot_secret: SecretBytes) -> SecretBytes | None:
    """Return the volume key in `slot`, or None if `slot_secret` does not open it.

    `bound` is the slot's hash. The commitment is compared first and in constant time: AES-GCM alone
    would accept a crafted slot under several keys, and so help to try many passphrases at once.
    """
    with derive(slot_secret, "slot-commit", bound) as commitment:
        if not hmac.compare_digest(commitment, slot.commitment):
            return None
    key = SecretBytes(KEY_SIZE)
    with derive(slot_secret, "slot-wrap", bound) as kek:
        try:
            AESGCM(kek).decrypt_into(_ZERO_NONCE, slot.wrapped, bound, key)
        except InvalidTag:
            key.wipe()
            return None
    return key


def open_slots(
    volume_id: bytes, slots: Mapping[int, Slot], secret: Secret
) -> Generator[tuple[int, SecretBytes], None, None]:
    """Yield (index, volume key) for each slot that `secret` opens. The caller wipes the keys.

    Raises NotEnoughMemory before the secret is used, nothing from then on.
    """
    fitting = {i: slot for i, slot in slots.items() if slot.type.secret_kind is secret.kind}
    if not fitting:
        return
    memory_kib = max(slot.kdf.memory_kib for slot in fitting.values())
    with _slot_secrets(secret, memory_kib) as slot_secret:
        for index, slot in fitting.items():
            bound = slot_hash(volume_id, index, slot.type, slot.kdf, slot.salt)
            stretched = slot_secret(slot.salt, slot.kdf)
            if stretched is None:
                return
            with stretched:
                key = unwrap(slot, bound, stretched)
            if key is not None:
                yield index, key


class _SlotSecrets:
    """Computes S of slot after slot from one secret."""

    def __init__(self, secret: Secret, stretcher: PassphraseStretcher | None) -> None:
        self._secret = secret
        self._stretcher = stretcher

    def __call__(self, salt: bytes, kdf: KdfParameters) -> SecretBytes | None:
        if self._stretcher is None:
            return extract(salt, self._secret.data)
        return self._stretcher.stretch(self._secret.data, salt, kdf)


@contextmanager
def _slot_secrets(secret: Secret, memory_kib: int) -> Iterator[_SlotSecrets]:
    if secret.kind is SecretKind.RANDOM:
        yield _SlotSecrets(secret, None)
        return
    with PassphraseStretcher(memory_kib) as stretcher:
        yield _SlotSecrets(secret, stretcher)


# Known answers


def self_test() -> None:
    """Check the primitives against published vectors; InternalError names the one that is wrong.

    Called once at start, before any secret is read: takes about a millisecond.
    """
    checks = {
        "HKDF-SHA256 (RFC 5869, case 1)": _check_hkdf,
        "HMAC-SHA256 (RFC 4231, case 2)": _check_hmac,
        "Argon2id (RFC 9106, section 5.3)": _check_argon2id,
        "AES-256-GCM (McGrew and Viega, case 16)": _check_gcm,
    }
    for name, check in checks.items():
        if not check():
            raise InternalError(name, "the cryptographic library computes a wrong answer")


def _check_hkdf() -> bool:
    prk = extract(bytes(range(13)), b"\x0b" * 22)
    out = HKDFExpand(SHA256(), 42, bytes(range(0xF0, 0xFA))).derive(prk)
    return out.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def _check_hmac() -> bool:
    return mac(b"Jefe", b"what do ya want for nothing?").hex() == (
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    )


def _check_argon2id() -> bool:
    kdf = Argon2id(
        salt=b"\x02" * 16,
        length=32,
        iterations=3,
        lanes=4,
        memory_cost=32,
        secret=b"\x03" * 8,
        ad=b"\x04" * 12,
    )
    return kdf.derive(b"\x01" * 32).hex() == (
        "0d640df58d78766c08c037a34a8b53c9d01ef0452d75b65eb52520e96b01e659"
    )


def _check_gcm() -> bool:
    cipher = AESGCM(bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2))
    nonce = bytes.fromhex("cafebabefacedbaddecaf888")
    aad = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    plain = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    sealed = cipher.encrypt(nonce, plain, aad)
    try:
        cipher.decrypt(nonce, sealed[:-1] + bytes([sealed[-1] ^ 1]), aad)
    except InvalidTag:
        return sealed.hex() == (
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
            "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
            "76fc6ece0f4e1768cddf8853bb2d551b"
        )
    return False
