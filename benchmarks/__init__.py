"""Benchmarks. A package, so that no other installed ``benchmarks`` shadows it on ``sys.path``."""
