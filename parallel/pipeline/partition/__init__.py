"""Partition of a traced model into stages, and the schedule that suits it.

partition        boundaries between stages, even in cost or given by ``parallel.split``
stage_plan       what each stage runs, receives, sends and holds; the minimum vertex cut behind it
cost_model       cost of calls and stages, in FLOPs or in measured seconds
auto_schedule    the fastest kind of schedule for the costs of the stages
"""
