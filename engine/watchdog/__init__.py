"""The watchdog: who is stuck, dead, slow or behind, and what every rank was in.

flight_folder    where the flight files of a host lie
view             what one rank does, as far as its host can see
diagnosis        from the views of all ranks to the ranks to blame, and why: pure data
stragglers       ranks that compute longer than others that do the same work: pure data
slow_links       ranks that wait longer for each other than others do, although all have come: pure data
timeline         the last events of all ranks on one clock, as text and as a trace
local_ranks      the ranks of one host, seen from its monitor
exchange         messages between the monitors of a job
monitor          a process of each host: looks at its ranks, tells the first host, ends a job that stands still
watchdog         the part within a rank: its flight recorder, and the start of a monitor
"""
