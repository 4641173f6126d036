"""State in host memory, as a plan sees it."""
