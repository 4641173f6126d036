"""Memory that all ranks of an axis can write, for kernels that communicate.

shared_bytes       what a backend gives: memory of equal size on every rank, and the addresses of all
symmetric_buffer   one rank's end of it: slots and arrivals, calls that are counted, what did not come
"""
