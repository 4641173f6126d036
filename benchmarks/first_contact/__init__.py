"""Checks and timings that need a GPU, the most important first, within one time budget.

command     the command line, and the order in which processes run
parts       the parts: what each runs, decides, and may take
processes   a part as a process with a limit, whose findings are written at once
findings    what was found: a JSON file a part, a log, a summary
stored      findings of one or more runs as the figure of the documents
child       the processes that are of this package: ``facts``, ``parity``, ``ranks``, ``gloo``, ``step``
"""
