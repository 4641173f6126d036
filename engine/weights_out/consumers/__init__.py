"""Consumers of whole tensors by Hugging Face names, in a thread of rank 0: folders of versions, inference engines.

A consumer reads one bucket of tensors at a time, and no rank of the training gathers anything for it.
"""
