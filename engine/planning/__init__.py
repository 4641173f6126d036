"""Planning: a :class:`Plan` of what every rank holds, sends and does, made without a process group."""
