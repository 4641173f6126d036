"""One step: microbatches, forwards and backwards in the order of the schedule, update, report."""
