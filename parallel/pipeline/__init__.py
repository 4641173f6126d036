"""Pipeline parallelism: an unchanged model cut into stages, and the order in which ranks work on them.

    schedule/     what each rank does in which order, as pure data: no tensors, no processes, no torch
    partition/    where a traced model is cut, what each stage runs, receives and sends; which schedule is fastest
    runtime/      a schedule carried out on this rank: stages in the user's forward, messages, split backwards
    report/       a schedule as text, SVG or Perfetto trace, predicted or measured

How an unchanged model becomes stages, in one process and without communication:

    engine.parallel.model.blocks      units: the modules that are black boxes, and the blocks among them
      -> engine.parallel.trace        one forward on meta tensors gives a ModelTrace: calls, glue, values
      -> partition.partition          boundaries between stages, from the costs in partition.cost_model
      -> partition.stage_plan         a StagePlan for each stage
      -> partition.auto_schedule      the fastest kind of schedule, or schedule.kinds: one by name

How one step runs:

    schedule.validate                 proves that the schedule can be run
      -> schedule.send_completion     tells when the tensors of a send can be released
      -> runtime.executor             plays this rank's row of actions over runtime.transport
      -> runtime.stage                runs one stage in the user's forward; parameters and values of other stages are
                                      placeholders (engine.parallel.model.placeholders)
"""
