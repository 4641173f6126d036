"""Service as a process: HTTP server, journal and command loop on the ranks.

front      rank 0: ledger, HTTP server in a thread, source of the command loop
service    a folder or an engine, served by all ranks
"""
