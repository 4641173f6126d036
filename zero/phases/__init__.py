"""State that leaves the device between two phases of a run."""
