"""Partition of a traced model into stages, and the choice of the fastest schedule.

partition        boundaries between stages, even in cost or given by ``parallel.split``
stage_plan       calls, messages and parameters of each stage, from a minimum vertex cut
cost_model       cost of calls and stages, in FLOPs or in measured seconds
auto_schedule    the fastest kind of schedule for the costs of the stages
"""
