"""From configuration and model to a :class:`Plan`: what every rank holds, sends and does. Needs no process group."""
