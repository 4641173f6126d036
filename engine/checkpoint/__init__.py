"""Checkpoints: whole or absent, checked on load, from any grid to any grid.

    run/
      step-00001200/               appears only by the rename of a finished folder
        manifest.json              everything below is listed here
        COMMIT                     length and sha256 of manifest.json; written last
        checksums.safetensors      one U64 tensor a file: a hash for each block
        model/                     a plain Hugging Face folder: whole tensors, from_pretrained loads it as it is
        optim/                     pieces of master weights and moments, as the ranks held them
        state/                     what belongs to one rank: raw states of random generators, its own buffers
      latest                       a hint for people; the loader trusts COMMIT

glossary   part      what a tensor rank holds of a parameter: rows of one dim, one behind the other
           piece     a flat range of a part; what a rank stores of a tensor
           run       elements that lie together in a source and in a target
           block     what one hash covers; the unit of reading
           image     a file in memory, page-aligned, as it will lie on the disk

Files, from the bottom up: ``files`` (every operation on files), ``tensor_file`` (the safetensors format),
``blocks`` (hashes), ``pieces`` (who has what, pure arithmetic), ``manifest``, ``committed`` (folders: newest,
commit, retention), ``image`` and ``write``, ``chunks`` and ``reader``; then what knows an engine: ``held`` (what
this rank has), ``save``, ``load``, ``background``.

Nothing here unpickles or evaluates anything.
"""
