"""Tenants of the training service: many trained models on one grid of ranks, each an engine.

adapters    base with low-rank adapters of a tenant (LoRA), placed on layers by their roles
skeleton    base without memory, and what its engine lends to the tenants
pool        tenants by id, of which full-parameter ones are parked on the host by turns
"""
