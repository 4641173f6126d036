"""Ranks that are threads of one process: a whole grid without processes, the same on every run.

``turns`` lets one rank run at a time, until it waits; ``thread_backend`` moves tensors between such ranks.
"""
