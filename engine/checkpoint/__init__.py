"""Checkpoints: committed as a whole or absent, verified on load, from any grid to any grid.

    run/
      step-00001200/               appears only by the rename of a finished folder
        manifest.json              lists every file and tensor below
        COMMIT                     length and sha256 of manifest.json; written last
        checksums.safetensors      one U64 tensor per file: a hash of every block
        model/                     a plain Hugging Face folder of full tensors; from_pretrained loads it as it is
      optim/                     pieces of master weights and moments, as sharded over the ranks
      state/                     the state of one rank: its random generators and the buffers that it writes
    latest                       a hint for people; the loader trusts COMMIT

glossary   part      the rows of one dim of a parameter on a tensor rank, concatenated
           piece     a flat range of a part; the elements of a tensor that one rank stores
           run       a stretch of elements that is contiguous in both the source and the target of a copy
           block     the bytes that one hash covers; the unit of reading
           image     a file in host memory, page-aligned, with the bytes that it will have on disk

``format/`` and ``contents/`` are independent of the training loop; the files of this folder connect them to the engine.

    format/         bytes on disk: files, blocks and their hashes, pieces, the manifest, step folders
    contents/       the state of an engine: ownership, local tensors, snapshot, optimizer and trainer state
    coordinator     checkpoint lifecycle of one engine: load, save on schedule, SIGTERM, close
    run_state       one engine as a checkpoint sees it: its tensors, metadata and progress
    writer, save    the background thread of a save; the collective write and commit that it runs
    resume, load    choose, verify and restore a checkpoint; read tensors into this rank's memory
    huggingface     weights from Hugging Face folders, and the small files that make one
    full_state      the full state dict, gathered on rank 0
    preemption      SIGTERM: finish the step, save, exit

save    coordinator -> writer: contents.snapshot -> thread: save (write, report, commit)
load    coordinator -> resume: format.step_reader -> load (read, share over dp) -> trainer state

Checkpoint files are parsed as data only: nothing here unpickles or evaluates them.
"""
