"""What the search for a tensor plan runs on, and where its results are kept."""
