"""Which modules of a user's model compute what one of our operators computes, and how they get it.

Nothing is known by class: a copy of the module with random weights is run beside the operator, outputs and gradients
are compared, and a module that agrees with one is given its forward. What does not agree stays as it is.
"""
