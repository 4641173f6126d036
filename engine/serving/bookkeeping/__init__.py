"""Books of a service on rank 0: futures, order, journal and restart.

entry      accepted commands and their states
session    sessions of clients, limits
line       numbered commands of one model
queue      fair order over sessions
journal    accepted commands on disk
ledger     all futures
restart    start from a journal
"""
