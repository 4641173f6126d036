"""A schedule carried out on this rank: stages, messages, backwards."""
