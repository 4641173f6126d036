"""Benchmarks. A package, so that no other installed ``benchmarks`` precedes it on the path."""
