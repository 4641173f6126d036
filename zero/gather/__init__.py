"""ZeRO-3: parameters are sharded, gathered over axis dp for the modules that run, and freed again."""
