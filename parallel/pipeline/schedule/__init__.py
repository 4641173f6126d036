"""Schedules of stages and microbatches on ranks, as pure data: no tensors, no processes, no torch.

actions           actions, schedules and their files, placement of stages on ranks
kinds             the kinds of schedules by name, with bubble and memory
one_f_one_b       GPipe, 1F1B, interleaved 1F1B, looped breadth-first, forward only
zero_bubble       ZB-H1 and ZB-V, filled by ``list_scheduler``
dualpipe_v        DualPipeV
dependencies      an order of all actions that satisfies their dependencies, or the cycle that forbids one
validate          proof that a schedule is complete and free of deadlock
simulate          a schedule in time: spans, idle time, live activations
send_completion   the points at which sends have completed
"""
