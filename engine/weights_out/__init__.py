"""Weights out: a training publishes versions of its weights, and receivers on any other cut take them over.

    trainer: every owner rank                                  receiver
    image of its elements of version 7   -- hashes of blocks ->   compares them with its own values
                                         -- lacking blocks   ->   shadow of its tensors; all hashes hold: takes over

version     messages, geometry of the model
plan        elements that flow from owners to receivers, in blocks of 256 KiB
image       host memory of one rank's elements of a version
sender      HTTP server of one rank
blocks      whole tensors of a version, a bucket at a time, for consumers
publisher   versions of an engine
reader      connections to all owner ranks, and to earlier receivers
transfer    blocks of one owner
receiver    tensors of a process that follows the training, and its server for later ones
commit      decision of several receivers, for all or for none

The servers need starlette, uvicorn and httpx: the extra ``trine[outer]``.
"""
