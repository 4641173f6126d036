"""The flight recorder: what each rank does, in a file that others read while it runs and after it was killed.

layout     bytes of the file: a header, then a ring of events
recorder   the rank writes, a microsecond an event
flight     a reader's view: what a rank is in, since when, and what it did before
"""
