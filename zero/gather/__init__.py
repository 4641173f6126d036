"""ZeRO 3: sharded parameters are gathered over axis dp for the modules that run, and freed again."""
