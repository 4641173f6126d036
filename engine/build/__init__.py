"""Build: validate a request, change the model as planned, and assemble the :class:`RankRuntime` of this rank."""
