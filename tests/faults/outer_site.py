"""Faults of a site: progress that is lost or counted twice, totals of one site, ranks that part, lost counters."""

from tests.faults.fault import Fault

_SITES = "tests/engine/outer/test_sites.py"
_GRIDS = "tests/engine/outer/test_grid_sites.py"
_ODD = "tests/engine/outer/test_odd_sites.py"
_UNTRAINED = "tests/engine/outer/test_untrained.py"

OUTER_SITE = (
    Fault(
        name="pushed-progress-counts-twice",
        about="The anchor stays where it was at a push, so a late take-over adds the pushed progress once more.",
        file="engine/outer/site_weights.py",
        old="            self.anchors.of(piece).copy_(weights)\n        return _joined(body)\n",
        new="        return _joined(body)\n",
        tests=(f"{_SITES}::test_one_site_gets_its_own_weights_back",),
    ),
    Fault(
        name="progress-since-the-push-is-lost",
        about="A late take-over replaces the weights, so the steps since the push have no effect.",
        file="engine/outer/site_weights.py",
        old="                weights.copy_(merged.double() + progress)\n",
        new="                weights.copy_(merged)\n",
        tests=(f"{_SITES}::test_one_site_gets_its_own_weights_back",),
    ),
    Fault(
        name="difference-in-single-precision",
        about="Differences are rounded to fp32 before they are sent as fp64, so a site drifts from its own weights.",
        file="engine/outer/site_weights.py",
        old="        delta = piece.chosen(self.anchors.of(piece)).double() - piece.chosen(weights).double()\n",
        new="        delta = piece.chosen(self.anchors.of(piece)) - piece.chosen(weights)\n",
        tests=(f"{_SITES}::test_one_site_gets_its_own_weights_back",),
    ),
    Fault(
        name="sites-with-other-frozen-weights-join",
        about="A site whose frozen weights differ trains on, and the merged weights fit no site.",
        file="engine/outer/store/records.py",
        old="        if value != known_value and value.split()[0]",
        new="        if value.split()[1] == known_value and value.split()[0]",
        tests=(f"{_UNTRAINED}::test_a_site_with_other_frozen_values_or_buffers_is_refused_by_name",),
    ),
    Fault(
        name="digests-by-place-in-the-shard",
        about="Digests of frozen weights count places within a rank's piece, so that sites on other grids are refused.",
        file="engine/outer/local_pieces.py",
        old="repeat_interleave(torch.from_numpy(spans.length))",
        new="mul(0).repeat_interleave(torch.from_numpy(spans.length))",
        tests=(f"{_UNTRAINED}::test_digests_do_not_depend_on_the_grid",),
    ),
    Fault(
        name="mixed-the-wrong-way",
        about="The fraction of the site's own weights is that of the merged weights.",
        file="engine/outer/site_weights.py",
        old="mixing * weights.detach().cpu().double() + (1 - mixing) * merged.double()",
        new="(1 - mixing) * weights.detach().cpu().double() + mixing * merged.double()",
        tests=("tests/engine/outer/test_sites.py::test_mixing_takes_that_fraction_of_the_own_weights",),
    ),
    Fault(
        name="loss-weight-of-one-site",
        about="Summed gradients of all sites are divided by the loss weight of one, so every update is too large.",
        file="engine/outer/site.py",
        old="            self._use_totals(step, flights[0])\n",
        new="",
        tests=(f"{_SITES}::test_two_sites_at_period_one_are_two_data_ranks_bit_for_bit",),
    ),
    Fault(
        name="rates-of-the-last-step",
        about="A store's optimizer gets the learning rate of the step before.",
        file="engine/outer/site.py",
        old="        self._rates.prepare(self._made)\n",
        new="",
        tests=(f"{_SITES}::test_two_sites_at_period_one_are_two_data_ranks_bit_for_bit",),
    ),
    Fault(
        name="take-over-without-a-gather",
        about="Merged weights stay in the shards of their owners, so data ranks compute with different parameters.",
        file="engine/outer/site_weights.py",
        old="        self._optimizer.refresh(self.local.buckets(fragment))\n",
        new="",
        tests=(f"{_GRIDS}::test_sites_on_different_grids_are_sites_of_one_rank",),
    ),
    Fault(
        name="gathers-of-the-own-buckets",
        about="A rank gathers only buckets of which it owns some of a fragment, so others wait for it: the step hangs.",
        file="engine/outer/local_pieces.py",
        old="        return [flat for flat in self.flats if any(slot.name in names for slot in flat.bucket.slots)]\n",
        new="        own = {id(each.flat) for each in self.of(fragment)}\n"
        "        return [flat for flat in self.flats if names and id(flat) in own]\n",
        tests=(f"{_GRIDS}::test_sites_on_different_grids_are_sites_of_one_rank",),
    ),
    Fault(
        name="flights-forgotten-by-checkpoints",
        about="A site from a checkpoint takes a merge over that contains its push before the due step.",
        file="engine/outer/site.py",
        old='            self._earlier = {int(number): int(step) for number, step in state["flights"]}\n',
        new="",
        tests=(f"{_GRIDS}::test_a_site_continues_on_another_grid",),
    ),
    Fault(
        name="anchors-not-saved",
        about="A checkpoint has no anchors, so a site that continues forgets its own progress.",
        file="engine/build/step_parts.py",
        old="    request.inventory.companions.append(weights.anchors)\n",
        new="",
        tests=(f"{_GRIDS}::test_a_site_continues_on_another_grid",),
    ),
    Fault(
        name="parameters-of-other-sites-are-skipped",
        about="At period 1 a site skips the update of a parameter that only another site has used, so weights differ.",
        file="engine/step/update.py",
        old="else runtime.reducer.unused - step.used\n",
        new="else runtime.reducer.unused\n",
        tests=(f"{_ODD}::test_a_parameter_that_another_site_uses_is_updated_as_in_one_process",),
    ),
    Fault(
        name="outage-of-a-store-is-silent",
        about="A site waits for a store that does not answer, and its log has no word about it.",
        file="engine/outer/http/line.py",
        old="        if silent is not None:\n            raise silent\n",
        new="",
        tests=(
            "tests/engine/outer/http/test_link.py::test_an_absent_store_is_one_sentence_at_the_join_and_no_error_later",
        ),
    ),
    Fault(
        name="outage-warns-at-every-renewal",
        about="The warning about a store that does not answer comes again at every renewal of the lease.",
        file="engine/outer/exchange.py",
        old="                if failed == _WARNED and",
        new="                if failed >= _WARNED and",
        tests=(f"{_ODD}::test_an_outage_is_one_warning_and_its_end_one_note",),
    ),
    Fault(
        name="renewal-ends-the-outage-of-a-push",
        about="A store with a full disk renews leases, and the site takes the outage of its push for ended.",
        file="engine/outer/http/connection.py",
        old='        self.outage = next(iter(list(self._in_trouble.values())), "")\n',
        new='        self.outage = ""\n',
        tests=("tests/engine/outer/http/test_link.py::test_a_renewal_describes_a_push_that_the_store_cannot_write",),
    ),
    Fault(
        name="end-waits-for-a-silent-store",
        about="A site that is interrupted while its store does not answer waits for its pushes before it ends.",
        file="engine/outer/exchange.py",
        old="        leave = leave and not self._link.outage\n",
        new="",
        tests=(f"{_ODD}::test_the_end_of_a_site_asks_only_a_store_that_answers",),
    ),
    Fault(
        name="progress-of-an-old-checkpoint-counts-twice",
        about="A site adds the progress of a checkpoint that a later push has sent already.",
        file="engine/outer/site.py",
        old="self.weights.anchors.filled and joined.rows <= self._pushed_rows\n",
        new="self.weights.anchors.filled\n",
        tests=(f"{_SITES}::test_a_checkpoint_older_than_the_last_push_counts_no_progress_twice",),
    ),
)
