"""Models that come with the engine, for the reference run and the benchmarks."""
