"""Rates of a machine at hand, measured for ``trine plan --calibrate``."""
