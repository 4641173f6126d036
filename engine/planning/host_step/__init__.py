"""What a step takes on processors, operator by operator, from seconds that were measured on the host at hand."""
