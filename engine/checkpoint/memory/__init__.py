"""Checkpoints in the memory of hosts: for the loss of one host, every few steps, beside those on disk.

    host 0  /dev/shm   files of its ranks   copies of host 1's        every rank sends its files to one rank
    host 1  /dev/shm   files of its ranks   copies of host 2's        of the next host
    host 2  /dev/shm   files of its ranks   copies of host 0's

host_map             which ranks share a memory, and who holds whose copy
memory_folder        where the files lie, and which run they belong to
mirror               a save: write here, copy to the next host, commit on all hosts, remove the older one
remote_files         read a checkpoint whose files lie in the memory of several hosts
memory_checkpoints   what an engine uses: save, find the newest, read it

The idea is that of Gemini (Wang et al., SOSP 2023): processes end more often than hosts, and hosts one at a time.
"""
