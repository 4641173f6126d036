"""A model cut into stages, and the order in which ranks work on them.

What each rank does, as pure data: these know no tensors and no processes and import no torch.

    actions        what a schedule is; ``schedule``: the kinds by name; ``schedule_file``: tokens in files
      placement    which stages a rank has; ``loops``, ``zero_bubble`` with its ``player``, ``dualpipe``: the orders
    order          in which sequence a schedule can happen; ``check`` proves that it can, and how long it takes
    release        when what was sent has surely left
    choose         the fastest kind for measured costs
    summary        its figures; ``draw``, ``svg`` and ``trace`` show it, predicted or measured

Who plays it: the ``executor``, over a ``transport`` that uses its ``buffers`` again; ``weights`` leaves gradients of
weights for later.

How an unchanged model becomes stages, in one process and without communication:

    units          which modules are black boxes, and which of them are blocks
    probe          one forward without content gives a timeline: calls, glue, values
      record       the function mode that writes it down; ``ledger``: what each tensor is; ``twins``: meta twins
      unchanged    puts back whatever that forward changes
    timeline       the data between probe and cut; ``difference``: where two of them part
    switches       attributes of the model that may turn its forward another way
    cut            where stages begin; ``balance``: even costs; ``recut``: the same boundaries on other inputs
      cost         what calls and stages cost, in FLOPs or in measured seconds
      stageplan    what one stage runs, receives, sends and holds; ``vertexcut``: the cheapest values that do
    stage          runs a plan in the user's forward; ``absent``: what is not here is NaN without memory
      run          tier 1: absent calls are answered; ``glue_run``: tier 2, glue operations too
      checkpoints    recomputation of what runs here, where the user's code checkpoints more than that
      intercept    how calls of units come to us; ``operation``: what the name of a torch function tells
"""
