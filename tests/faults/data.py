"""Faults of the loader: the place in the data, who reads which rows, borders of documents, the end."""

from tests.faults.fault import Fault

HISTORIES = "tests/engine/data/test_loader_histories.py::test_no_sample_is_repeated_or_skipped_whatever_the_history"
SOURCE = "engine/data/step_source.py"

DATA = (
    Fault(
        name="place-moves-with-microbatches",
        about="The place is that behind a step as soon as its first microbatch is taken, so a stop skips the others.",
        file="engine/data/step_loader.py",
        old="        if not self._held:\n            self._place = self._behind\n        return microbatch",
        new="        self._place = self._behind\n        return microbatch",
        tests=("tests/engine/data/test_loader.py::test_the_place_moves_with_whole_steps",),
    ),
    Fault(
        name="rows-of-other-ranks",
        about="Data ranks take their rows microbatch by microbatch in turn, so another grid has another order.",
        file="engine/data/settings.py",
        old="first = position + self.rank * self.micro * self.accumulation",
        new="first = position + self.rank * self.micro",
        tests=("tests/engine/data/test_loader.py::test_each_rank_reads_its_rows_of_the_global_batch",),
    ),
    Fault(
        name="cut-document-begun-again",
        about="A run that goes on within a document packs it from its first token once more.",
        file="engine/data/packed_rows.py",
        old="yield DataPosition(position, epoch, read + whole, 0 if whole else used), pieces",
        new="yield DataPosition(position, epoch, read + whole), pieces",
        tests=(HISTORIES,),
    ),
    Fault(
        name="target-across-documents",
        about="The last token of a packed document learns the first token of another document.",
        file="engine/data/packed_rows.py",
        old="            labels[at + 1 : end] = tokens[1:]",
        new="            labels[at:end] = tokens",
        tests=("tests/engine/data/test_loader.py::test_borders_of_documents",),
    ),
    Fault(
        name="rows-past-the-end-count",
        about="Rows that fill the last step up keep their labels, so the last sample weighs more than others.",
        file="engine/data/step_source.py",
        old="return _without_labels(batch, absent, len(samples)) if absent else batch",
        new="return batch",
        tests=("tests/engine/data/test_loader.py::test_a_last_step_that_is_not_whole",),
    ),
    Fault(
        name="loaded-twice",
        about="A stream that was given a state of its own is read from there, and the loader skips its samples again.",
        file=SOURCE,
        old='if getattr(dataset, "_starting_state_dict", None) is not None:',
        new="if False:",
        tests=("tests/engine/data/test_datasets_and_torchdata.py::test_a_stream_with_a_state_of_its_own_is_refused",),
    ),
    Fault(
        name="epochs-in-one-order",
        about="Documents are packed in the order of the first epoch in every epoch, though shuffling was asked for.",
        file="engine/data/packed_rows.py",
        old="return self._shuffled.stream(epoch * self.samples, self.samples)",
        new="return self._shuffled.stream(0, self.samples)",
        tests=("tests/engine/data/test_loader.py::test_every_epoch_has_its_own_order",),
    ),
)
