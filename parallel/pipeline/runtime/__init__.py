"""Execution of a schedule on this rank: the row of actions, the stages in the user's forward, and the messages.

executor         plays the row: receive, compute, send, release
transport        messages between stages, and reusable memory for received ones
stage            runs one stage of a model in the user's own forward
stage_forward    tier 1: calls of other stages return received values
glue_forward     tier 2: operations between calls are compared as well
split_backward   weight gradients deferred from the backward of a stage
outputs          outputs of the last stage, sent to rank 0
"""
