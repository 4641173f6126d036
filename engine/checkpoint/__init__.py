"""Checkpoints: committed as a whole or absent, verified on load, from any grid to any grid.

    run/
      step-00001200/               appears only by the rename of a finished folder
        manifest.json              lists every file and tensor below
        COMMIT                     length and sha256 of manifest.json; written last
        checksums.safetensors      one U64 tensor per file: a hash of every block
        model/                     a Hugging Face folder of full tensors, for from_pretrained
        optim/                     pieces of master weights and moments, as sharded over the ranks
        state/                     state of single ranks: random generators, buffers
      latest                       a hint for people; the loader trusts COMMIT

glossary   part      rows along one dim of a parameter on a tensor rank, concatenated
           piece     a flat range of a part: the elements of a tensor that one rank saves
           run       a range of elements that is contiguous in both the source and the target of a copy
           block     the bytes of one hash; the unit of reading
           image     a file in page-aligned host memory, byte for byte as on disk

    format/         bytes on disk: files, blocks and their hashes, pieces, the manifest, step folders
    contents/       state of an engine: ownership, local tensors, snapshot, optimizer and trainer state
    coordinator     checkpoints of one engine: load, save on schedule, SIGTERM, close
    run_state       tensors, metadata and progress of one engine, for saves and loads
    writer, save    background thread of a save; its collective write and commit
    resume, load    choose, verify and restore a checkpoint; read tensors into this rank's memory
    huggingface     weights from Hugging Face folders, and their files without tensors
    full_state      the full state dict, gathered on rank 0

save    coordinator -> writer: contents.snapshot -> thread: save (write, report, commit)
load    coordinator -> resume: format.step_reader -> load (read, share over dp) -> trainer state

Checkpoint files are parsed as data only: nothing here unpickles or evaluates them.
"""
