"""Models of a server as functions of tensors: gradients cross the network.

client    RemoteModel: forward, backward, update of a served model from a process that has only torch and httpx
line      requests that repeat until the server answers, each counted once
"""
