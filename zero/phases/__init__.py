"""All state that a rank holds, as one list, and what of it leaves the device between two phases of a run."""
