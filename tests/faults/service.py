"""Faults of the training service: repeated and reordered requests, crashes, shares, limits and tokens."""

from tests.faults.fault import Fault

SERVING, TESTS = "engine/serving", "tests/engine/serving"
_INPUTS = f"{TESTS}/test_input_gradients.py::test_inputs_get_the_gradients_of_one_process[pp2-trained]"

SERVICE = (
    Fault(
        name="inputs-get-the-gradient-of-one-stage",
        about="An input that several stages read gets the part of the gradient that this rank's stage has.",
        file="engine/step/pipeline_call.py",
        old='            comm.all_reduce(grad, "pp", INPUT_GRADIENTS).wait()\n',
        new="",
        tests=(_INPUTS,),
    ),
    Fault(
        name="stages-without-gradients-send-none-to-inputs",
        about="A call with gradients of inputs uses the trace of one without, whose frozen stages send no gradient.",
        file="engine/step/trace_cache.py",
        old="leaf.dtype, leaf.requires_grad)",
        new="leaf.dtype)",
        tests=(_INPUTS.replace("trained", "frozen"),),
    ),
    Fault(
        name="outputs-of-inputs-alone-have-no-gradient",
        about="An output that no parameter reaches passes no gradient on to the input that it was computed from.",
        file="engine/step/pipeline_call.py",
        old="return leaf.dtype.is_floating_point and inputs.present",
        new="return False",
        tests=(_INPUTS,),
    ),
    Fault(
        name="another-request-gets-the-first-result",
        about="A number that repeats with another body gets the result of the first request.",
        file=f"{SERVING}/bookkeeping/ledger.py",
        old="                if known is not None and known.digest != entry.digest:\n",
        new="                if known is not None and known.route != entry.route:\n",
        tests=(f"{TESTS}/test_ledger.py::test_chunks_in_any_order_each_twice_run_once_and_in_order",),
    ),
    Fault(
        name="commands-run-as-they-arrive",
        about="Chunks that a client sends at the same time run in the order of their arrival.",
        file=f"{SERVING}/bookkeeping/ledger.py",
        old="        if line is None or not entry.number:\n            self.queue.put(entry)\n",
        new="        if line is None or entry.number:\n            self.queue.put(entry)\n",
        tests=(f"{TESTS}/test_ledger.py::test_chunks_in_any_order_each_twice_run_once_and_in_order",),
    ),
    Fault(
        name="full-queue-refuses-the-missing-number",
        about="A full queue refuses the number that all commands in it wait for, so the client hangs.",
        file=f"{SERVING}/bookkeeping/ledger.py",
        old="line.waits_for(first.number):\n",
        new="line.waits_for(first.number) and not line.held:\n",
        tests=(f"{TESTS}/test_ledger.py::test_a_full_queue_is_429_but_a_number_that_others_wait_for_is_accepted",),
    ),
    Fault(
        name="wrong-request-leaves-a-gap",
        about="A request with a mistake takes no number, so later commands of the model wait until their deadline.",
        file=f"{SERVING}/bookkeeping/line.py",
        old="            if entry.state is EntryState.HELD:\n                yield entry\n",
        new="            if entry.state is not EntryState.HELD:\n                return\n            yield entry\n",
        tests=(f"{TESTS}/test_ledger.py::test_a_wrong_request_takes_its_number_and_later_ones_run",),
    ),
    Fault(
        name="snapshot-loses-the-gradient",
        about="A snapshot between forward_backward and optim_step loses the accumulated gradient at a restart.",
        file=f"{SERVING}/bookkeeping/ledger.py",
        old="line.is_clean and not line.is_saving\n",
        new="not line.is_saving\n",
        tests=(f"{TESTS}/test_journal.py::test_a_snapshot_waits_for_the_update_of_its_gradient",),
    ),
    Fault(
        name="id-is-answered-before-the-journal",
        about="A future's id is answered before its command is on disk, so a crash loses it.",
        file=f"{SERVING}/wire/routes.py",
        old="        await self.wait_stored(entry.stored)\n",
        new="",
        tests=(f"{TESTS}/wire/test_stored_first.py::test_an_id_is_answered_after_its_command_is_on_disk",),
    ),
    Fault(
        name="half-a-frame-is-followed-by-others",
        about="A frame that could not be written stays in the journal, which is damaged from then on.",
        file=f"{SERVING}/bookkeeping/journal.py",
        old="            self._files.truncate(self._file, self._position)\n",
        new="",
        tests=(f"{TESTS}/test_journal.py::test_a_full_disk_refuses_and_later_requests_are_stored",),
    ),
    Fault(
        name="samples-before-training",
        about="A training step waits for all samples in the queue.",
        file=f"{SERVING}/bookkeeping/queue.py",
        old="        if self._samples.count and is_due:\n",
        new="        if self._samples.count:\n",
        tests=(f"{TESTS}/test_queue.py::test_training_goes_before_samples_and_samples_do_not_starve",),
    ),
    Fault(
        name="service-without-its-token",
        about="A request whose key begins as the token does is served.",
        file=f"{SERVING}/wire/application.py",
        old="        return any([hmac.compare_digest(given, one) for one in accepted])\n",
        new="        return any(given.startswith(one) for one in accepted)\n",
        tests=(f"{TESTS}/wire/test_routes.py::test_without_the_token_nothing_is_answered_but_health",),
    ),
    Fault(
        name="empty-messages-fill-the-memory",
        about="A protobuf of empty messages, two bytes each, takes fifty times its size in memory.",
        file=f"{SERVING}/wire/requests.py",
        old="        _count_fields(body)\n",
        new="",
        tests=(f"{TESTS}/wire/test_routes.py::test_a_refused_request_has_a_status_and_a_sentence",),
    ),
)
