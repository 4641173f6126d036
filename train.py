"""The reference run: a small decoder on real text, on any grid.

    torchrun --nproc_per_node 4 train.py

The same command continues where the last start ended, on any number of processes. The engine's part is ``initialize``,
``train_batch``, ``eval_batch`` and ``load_checkpoint``; the rest is the usual: text, model, a loop, a few printed
lines.
"""

import logging
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

from engine.launch.run_folder import training_options
from engine.reporting.failure_message import FailureMessage


def main() -> None:
    """Read the options and run; after a failure, torchrun shows what the rank that failed first says of it."""
    options = training_options()
    FailureMessage()

    from engine.parallel.comm.world import leave_traceback  # import torch only now, so that --help answers at once

    leave_traceback(lambda: run(options))


def run(options: Namespace) -> None:
    """Train, validate, generate a sample, and compare planned with measured bytes."""
    import engine
    from engine.data import Batches, Sampler, window_count
    from engine.launch import reference_run as train
    from engine.launch import run_folder
    from engine.models.decoder import Decoder, loss_sum

    settings = train.read_settings(options, root=Path(__file__).parent)
    training_text, validation_text = train.read_corpus(options)
    shape = train.decoder_config(options)
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)

    first = train.job_place()[0] == 0
    folder = run_folder.open_run(options, settings, training_text, shape) if first else nullcontext()
    example = train.example_batch(settings, shape)
    with folder, engine.initialize(lambda: Decoder(shape), settings, loss_fn=loss_sum, example_batch=example) as eng:
        if first:
            train.say(train.describe_text(training_text))
        windows = window_count(len(training_text.tokens), shape.context)
        rows = eng.config.train_batch_size
        assert rows is not None
        sampler = Sampler(windows, rows, eng.config.seed, eng.grid.row_rank, eng.grid.row_ranks)
        batches = Batches(training_text, shape.context, sampler)
        eng.register_for_checkpointing(data=sampler)
        eng.load_checkpoint(missing_ok=True)
        begun = eng.step_count
        if first:
            train.say(*run_folder.go_on(options, begun))
        line = train.ProgressLine(options.steps, eng.config.monitor.every)
        while eng.step_count < options.steps:
            report = eng.train_batch(next(batches))
            if first:
                line.show(report)
        train.save_last(eng, begun)

        loss = train.evaluate(eng, validation_text, shape.context)
        text = train.sample_text(eng, shape, options.sample)
        if first and text is not None:
            train.say(f"validation loss {loss:.3f}, {train.bits_per_byte(loss):.3f} bits per byte")
            train.say(f"--- sample\n{train.decode_for_terminal(text)}\n---")
            if eng.step_count > begun and (sent := eng.traffic_report()):
                train.say(sent)


if __name__ == "__main__":
    main()
