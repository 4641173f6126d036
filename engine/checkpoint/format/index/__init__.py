"""Manifests of many ranks: an index that every rank reads, and parts that a rank reads when it needs them."""
