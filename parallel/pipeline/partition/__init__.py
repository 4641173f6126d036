"""Where a traced model is cut into stages, what each stage sends and holds, and which schedule is fastest."""
