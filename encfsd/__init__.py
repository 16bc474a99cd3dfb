"""An encrypted, authenticated FUSE file system: one Merkle tree a volume."""

__version__ = "0.1.0"
