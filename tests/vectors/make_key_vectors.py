"""Write the vectors of docs/format-keys.md: ``python tests/vectors/make_key_vectors.py [FOLDER]``.

An implementation of its own, on nothing but primitives, so that a mistake in encfsd/keys.py does
not agree with itself. Every number is fixed, so a second run writes the same bytes. One scenario a
file. `expect` is "success" or the error class of encfsd/errors.py that must come.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
import sys
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

VID = bytes(range(16))
VK = bytes(range(0x40, 0x60))
SALT = bytes(range(0x80, 0xA0))
KEY_FILE = b"\xff" * 16 + bytes(range(16))
PASSPHRASE = b"correct horse battery staple"
OTHER_PASSPHRASE = b"Tr0ub4dor&3"
MIB = 1024  # KiB


def hmac256(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def f(key: bytes, label: str, context: bytes = b"") -> bytes:
    """HKDF-Expand for 32 bytes is a single HMAC."""
    return hmac256(key, b"encfsd/v1/" + label.encode() + b"\0" + context + b"\x01")


P = hmac256(VID, VK)


class Slot:
    """A key slot and all intermediate values."""

    def __init__(
        self, index: int, kind: int, secret: bytes, memory: int = 64 * MIB, passes: int = 3
    ) -> None:
        self.index, self.kind, self.secret = index, kind, secret
        self.memory, self.passes = (memory, passes) if kind == 1 else (0, 0)
        self.bound = hashlib.sha256(
            struct.pack("<I16sIIII", 1, VID, index, kind, self.memory, self.passes) + SALT
        ).digest()
        if kind == 1:
            self.s = Argon2id(
                salt=SALT, length=32, iterations=self.passes, lanes=1, memory_cost=self.memory
            ).derive(secret)
        else:
            self.s = hmac256(SALT, secret)
        self.commitment = f(self.s, "slot-commit", self.bound)
        self.kek = f(self.s, "slot-wrap", self.bound)
        self.wrapped = AESGCM(self.kek).encrypt(bytes(12), VK, self.bound)

    def pack(self) -> bytes:
        head = struct.pack("<IIII", self.kind, self.memory, self.passes, 0)
        return head + SALT + self.commitment + self.wrapped

    def describe(self) -> dict[str, object]:
        return {
            "volume_id": VID.hex(),
            "index": self.index,
            "type": self.kind,
            "memory_kib": self.memory,
            "passes": self.passes,
            "salt": SALT.hex(),
            "secret": self.secret.hex(),
            "volume_key": VK.hex(),
            "SH": self.bound.hex(),
            "S": self.s.hex(),
            "COM": self.commitment.hex(),
            "KEK": self.kek.hex(),
            "wrapped": self.wrapped.hex(),
        }


def header(*slots: Slot, generation: int = 1, **patches: str) -> bytes:
    """Return an authentic header; `patches` (at_OFFSET="hex") are applied before the MAC."""
    raw = bytearray(4096 - 32)
    raw[:32] = b"ENCVOL" + struct.pack("<HQ", 1, generation) + VID
    for slot in slots:
        raw[64 + slot.index * 128 : 64 + slot.index * 128 + 128] = slot.pack()
    for place, data in patches.items():
        offset = int(place.removeprefix("at_"))
        raw[offset : offset + len(data) // 2] = bytes.fromhex(data)
    return bytes(raw) + hmac256(f(P, "header"), bytes(raw))


# AES-GCM does not commit to its key: one ciphertext can be valid under two keys. Its tag is E(J0) +
# GHASH, which is linear in each ciphertext block; solve for the block that makes both tags agree.


def multiply(x: int, y: int) -> int:
    """Multiply in GF(2^128) with GCM's bit order."""
    product = 0
    for bit in range(127, -1, -1):
        if y >> bit & 1:
            product ^= x
        x = x >> 1 ^ (0xE1 << 120 if x & 1 else 0)
    return product


def invert(x: int) -> int:
    """Return x ** (2 ** 128 - 2)."""
    result = 1 << 127
    for _ in range(127):
        x = multiply(x, x)
        result = multiply(result, x)
    return result


def wrapped_for_two(one: bytes, two: bytes, aad: bytes) -> bytes:
    """Return 32 bytes of ciphertext and a tag that AES-GCM accepts under both keys."""
    first = bytes(range(16))

    def terms(key: bytes) -> tuple[int, int]:
        """Return the tag with a zero second block, and the factor of that block."""
        aes = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        h, mask = (
            int.from_bytes(aes.update(block), "big") for block in (bytes(16), bytes(15) + b"\1")
        )
        total = 0
        lengths = struct.pack(">QQ", 8 * len(aad), 8 * 32)
        for block in (aad[:16], aad[16:], first, bytes(16), lengths):
            total = multiply(total ^ int.from_bytes(block, "big"), h)
        return total ^ mask, multiply(h, h)

    (tag1, factor1), (tag2, factor2) = terms(one), terms(two)
    second = multiply(tag1 ^ tag2, invert(factor1 ^ factor2))
    tag = tag1 ^ multiply(second, factor1)
    return first + second.to_bytes(16, "big") + tag.to_bytes(16, "big")


def key_vectors() -> dict[str, dict[str, object]]:
    vectors: dict[str, dict[str, object]] = {
        "extract-volume-key": {"salt": VID.hex(), "material": VK.hex(), "output": P.hex()},
    }
    for name, label, context in (
        ("header", "header", b""),
        ("freshness", "freshness", VID),
        ("object-0", "object", struct.pack("<I", 0) + bytes(16)),
    ):
        vectors[f"derive-{name}"] = {
            "key": P.hex(),
            "label": label,
            "context": context.hex(),
            "output": f(P, label, context).hex(),
        }
    vectors["slot-passphrase"] = Slot(0, 1, PASSPHRASE).describe()
    vectors["slot-key-file"] = Slot(1, 2, KEY_FILE).describe()
    mine, other = Slot(0, 2, b"\xaa" * 32), Slot(0, 2, b"\xbb" * 32)
    vectors["slot-crafted-for-two-secrets"] = {
        **mine.describe(),
        "wrapped": wrapped_for_two(mine.kek, other.kek, mine.bound).hex(),
        "other_S": other.s.hex(),
        "other_KEK": other.kek.hex(),
    }
    record = b"ENCSTA" + struct.pack("<HQ16sQQQQ", 1, 1, VID, 7, 3, 41, 2)
    record += b"\x52" * 32 + b"\x44" * 32 + struct.pack("<Q24s", 4, bytes(24))
    vectors["state-record"] = {
        "volume_id": VID.hex(),
        "volume_key": VK.hex(),
        "clean": True,
        "sequence": 7,
        "epoch": 3,
        "counter": 41,
        "header_generation": 2,
        "R": "52" * 32,
        "header_digest": "44" * 32,
        "epoch_begun": 4,
        "record": (record + hmac256(f(P, "freshness", VID), record)).hex(),
    }
    return vectors


def header_vectors() -> dict[str, dict[str, object]]:
    key_file, credential = Slot(0, 2, KEY_FILE), Slot(3, 3, b"\xee" * 32)
    passphrase = Slot(1, 1, PASSPHRASE)
    two_passphrases = Slot(0, 1, PASSPHRASE)
    other_kek = f(
        Argon2id(salt=SALT, length=32, iterations=3, lanes=1, memory_cost=64 * MIB).derive(
            OTHER_PASSPHRASE
        ),
        "slot-wrap",
        two_passphrases.bound,
    )
    two_passphrases.wrapped = wrapped_for_two(two_passphrases.kek, other_kek, two_passphrases.bound)
    good = header(key_file)
    wrong_mac = good[:-1] + bytes([good[-1] ^ 1])
    cases: list[tuple[str, bytes, int, bytes, str]] = [
        ("one-key-file", good, 2, KEY_FILE, "success"),
        ("three-slots-by-credential", header(key_file, passphrase, credential, generation=9), 3,
         b"\xee" * 32, "success"),
        ("three-slots-by-passphrase", header(key_file, passphrase, credential, generation=9), 1,
         PASSPHRASE, "success"),
        ("empty", b"", 2, KEY_FILE, "NotAVolume"),
        ("other-magic", header(key_file, at_0="58"), 2, KEY_FILE, "NotAVolume"),
        ("newer-format", header(key_file, at_6="0200"), 2, KEY_FILE, "NewerFormat"),
        ("format-0", header(key_file, at_6="0000"), 2, KEY_FILE, "DamagedHeader"),
        ("truncated", good[:-1], 2, KEY_FILE, "DamagedHeader"),
        ("too-long", good + b"\0", 2, KEY_FILE, "DamagedHeader"),
        ("generation-0", header(key_file, generation=0), 2, KEY_FILE, "DamagedHeader"),
        ("no-slot", header(), 2, KEY_FILE, "DamagedHeader"),
        ("reserved-byte-of-head", header(key_file, at_63="01"), 2, KEY_FILE, "DamagedHeader"),
        ("reserved-byte-of-slot", header(key_file, at_76="01"), 2, KEY_FILE, "DamagedHeader"),
        ("reserved-byte-of-tail", header(key_file, at_4063="01"), 2, KEY_FILE, "DamagedHeader"),
        ("free-slot-not-zero", header(key_file, at_208="01"), 2, KEY_FILE, "DamagedHeader"),
        ("slot-type-5", header(key_file, at_64="05"), 2, KEY_FILE, "DamagedHeader"),
        ("key-file-with-kdf-cost", header(key_file, at_68="01"), 2, KEY_FILE, "DamagedHeader"),
        ("kdf-memory-too-small", header(passphrase, at_196="ffff0000"), 1, PASSPHRASE,
         "DamagedHeader"),
        ("kdf-memory-too-large", header(passphrase, at_196="01004000"), 1, PASSPHRASE,
         "DamagedHeader"),
        ("kdf-passes-too-few", header(passphrase, at_200="02"), 1, PASSPHRASE, "DamagedHeader"),
        ("kdf-passes-too-many", header(passphrase, at_200="21"), 1, PASSPHRASE, "DamagedHeader"),
        ("wrong-secret", good, 2, b"\x01" * 32, "UnlockFailed"),
        ("wrong-mac", wrong_mac, 2, KEY_FILE, "UnlockFailed"),
        ("commitment-changed", header(key_file, at_112="00"), 2, KEY_FILE, "UnlockFailed"),
        ("wrapped-key-changed", header(key_file, at_144="00"), 2, KEY_FILE, "UnlockFailed"),
        ("slot-moved", header(key_file, at_64=bytes(128).hex(), at_192=key_file.pack().hex()), 2,
         KEY_FILE, "UnlockFailed"),
        ("slot-type-changed", header(key_file, at_64="03"), 3, KEY_FILE, "UnlockFailed"),
        ("crafted-for-two-passphrases", header(two_passphrases), 1, OTHER_PASSPHRASE,
         "UnlockFailed"),
    ]  # fmt: skip
    return {
        name: {
            "size": len(raw),
            "parts": parts(raw),
            "secret_type": kind,
            "secret": secret.hex(),
            "expect": expect,
            **({"volume_key": VK.hex()} if expect == "success" else {}),
        }
        for name, raw, kind, secret, expect in cases
    }


def parts(raw: bytes) -> dict[str, str]:
    """Return the 16-byte lines that are not zero, by offset: headers are mostly zeros."""
    lines = {offset: raw[offset : offset + 16] for offset in range(0, len(raw), 16)}
    return {str(offset): line.hex() for offset, line in lines.items() if any(line)}


def main(folder: Path) -> None:
    for sub, vectors in (("keys", key_vectors()), ("header", header_vectors())):
        (folder / sub).mkdir(exist_ok=True)
        for name, vector in vectors.items():
            path = folder / sub / f"{name}.json"
            path.write_text(json.dumps({"scenario": name, **vector}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
