"""Programs that are sent to hosts as text and run there, so they import nothing but Python's own modules."""
