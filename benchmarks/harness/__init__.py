"""What all benchmarks use: rounds of processes that take turns, counts of memory and traffic, tables, figures."""
