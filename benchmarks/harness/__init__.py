"""Shared code of all benchmarks: interleaved rounds of processes, memory and traffic counts, tables, figures."""
