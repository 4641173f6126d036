"""Tests that need a GPU: ``pytest -m gpu`` collects this folder alone.

They import torch, triton, transformers, pytest and what the engine itself needs, since a GPU machine may have nothing
else; ``tests/test_gpu_collection.py`` holds that where there is no GPU.
"""
