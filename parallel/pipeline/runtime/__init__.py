"""A schedule carried out on this rank: the row of actions, the stages in the user's forward, and their messages.

executor         plays the row: receive, compute, send, release
transport        messages between stages, and reusable memory for received ones
stage            runs one stage of a model in the user's own forward
stage_forward    tier 1: calls of other stages are answered
glue_forward     tier 2: operations between calls are looked up too
split_backward   weight gradients deferred from the backward of a stage
outputs          outputs of the last stage, brought to rank 0
"""
