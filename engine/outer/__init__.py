"""Outer loop over sites: codecs of pushed values, and fragments of a model."""
