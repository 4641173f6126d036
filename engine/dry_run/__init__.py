"""A rank of a plan runs its actions on shapes: nothing is computed or sent, and what lives is counted."""
