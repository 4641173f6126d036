"""What things cost, measured. A package, so that no other ``benchmarks`` that is installed comes before it."""
