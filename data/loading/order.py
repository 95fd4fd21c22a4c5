"""Deterministic order: a random-access permutation of any length, and the hash that holds samples out."""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1


def digest64(*parts: object) -> int:
    """64 bits of SHA-256 over the parts; the same on every machine and in every process."""
    # A separator that no name holds, so that ("ab", "c") is not ("a", "bc").
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def held_out(key: str, fraction: float) -> bool:
    """Whether the sample `key` belongs to the held-out `fraction`: by its hash, so that it never changes
    sides."""
    return digest64("held-out", key) < fraction * 2.0**64


def _mix(value: int, key: int) -> int:
    """Finaliser of splitmix64: every input bit reaches every output bit."""
    value = (value + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A random permutation of range(size) that is computed per position and takes no memory.

    Six rounds of a balanced Feistel network over the next even number of bits, walked until the value falls
    in range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, size: int, *key: object) -> None:
        if size < 1:
            raise ValueError(f"Permutation: size {size}, expected at least 1")
        self.size = size
        # Both halves of equal width: the domain is at most four times the size.
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        seed = digest64("permutation", size, *key)
        self._keys = [_mix(seed, (i + 1) * 0x9E3779B97F4A7C15) for i in range(6)]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} of a permutation of {self.size}")
        mask = (1 << self._half) - 1
        value = position
        # Cycle walking: values out of range are mapped again until one falls in; twice on average.
        while True:
            left, right = value >> self._half, value & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right, key) & mask)
            value = left << self._half | right
            if value < self.size:
                return value
