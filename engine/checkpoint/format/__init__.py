"""Bytes of a checkpoint on disk; independent of the engine.

filesystem         every operation on files, and small files read or written whole
safetensors_file   layout and header of a safetensors file
checked_blocks     hashes of blocks, and reading in chunks that are checked
pieces             parts and pieces of tensors, and the elements that two pieces share
manifest           manifest.json: what the checkpoint holds and where
step_folders       list, commit, retain and sweep the checkpoints of a run
host_image         a file in host memory, and its write past the page cache
step_reader        read pieces of tensors from a committed checkpoint
strict_json        JSON that may be damaged or hostile
"""
