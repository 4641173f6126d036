"""Pipeline parallelism: an unchanged model cut into stages, and the schedule of the ranks.

    schedule/     the order of actions on each rank, as pure data: no tensors, no processes, no torch
    partition/    the cut of a traced model, the plan of each stage, and the choice of the fastest schedule
    runtime/      execution of a schedule on this rank: stages in the user's forward, messages, split backwards
    report/       a schedule as text, SVG or Perfetto trace, predicted or measured

Steps from an unchanged model to stages, in one process and without communication:

    engine.parallel.model.blocks      units: the modules that are black boxes, and the blocks among them
      -> engine.parallel.trace        one forward on meta tensors makes a ModelTrace: calls, glue, values
      -> partition.partition          boundaries between stages, from the costs in partition.cost_model
      -> partition.stage_plan         a StagePlan for each stage
      -> partition.auto_schedule      the fastest kind of schedule, or a kind by name: schedule.kinds

Steps of a run:

    schedule.validate                 proves that the schedule can be run
      -> schedule.send_completion     computes the points at which sent tensors can be released
      -> runtime.executor             plays this rank's row of actions over runtime.transport
      -> runtime.stage                runs one stage in the user's forward; parameters and values of other stages are
                                      placeholders (engine.parallel.model.placeholders)
"""
