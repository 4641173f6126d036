"""Bytes on disk: files, blocks and their hashes, the manifest, step folders. Knows no engine."""
