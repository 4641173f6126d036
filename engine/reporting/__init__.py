"""Reporting: the report of a step, the sinks that reports are written to, and the banner of a plan."""
