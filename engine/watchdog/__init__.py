"""The watchdog: who is stuck, dead or behind, and what every rank was in.

view        what one rank does, as far as its host can see
diagnosis   from the views of all ranks to the ranks to blame, and why: pure data
monitor     a process of each host: reads flight files, tells the first host, ends a job that stands still
watchdog    the part within a rank: its flight recorder, and the start of a monitor
"""
