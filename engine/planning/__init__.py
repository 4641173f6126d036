"""Planning: a :class:`Plan` of every rank's state, traffic and actions, made without a process group."""
