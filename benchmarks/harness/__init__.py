"""Shared parts of all benchmarks: rounds of processes in turns, memory and traffic counts, tables, figures."""
