"""Products that communicate, beside chunks, collectives and torch's own."""
