"""Models that ship with the engine, for the reference run and the benchmarks."""
