"""Faults of the watchdog, of the guard against silent corruption, of copies in memory and of the launcher."""

from tests.faults.fault import Fault

_DIAGNOSIS = "tests/engine/watchdog/test_diagnosis.py"
_GUARD = "tests/engine/integrity/test_guard.py"
_MEMORY = "tests/engine/checkpoint/test_memory_checkpoints.py"
_PREFLIGHT = "tests/launch/jobs/test_preflight.py"

RELIABILITY = (
    Fault(
        name="a-waiting-rank-is-blamed",
        about="The watchdog blames the ranks that wait, and not the one that they wait for.",
        file="engine/watchdog/diagnosis.py",
        old="        if view.waiting is None:\n            roots",
        new="        if view.waiting is not None:\n            roots",
        tests=(f"{_DIAGNOSIS}::test_the_one_for_whom_all_wait",),
    ),
    Fault(
        name="a-consequence-is-taken-for-the-cause",
        about="A rank that another one has taken down is blamed for the end of the job.",
        file="engine/watchdog/diagnosis.py",
        old="causes = [view for view in gone if not is_consequence(view.words)]",
        new="causes = list(gone)",
        tests=(f"{_DIAGNOSIS}::test_a_rank_that_blames_another_one_is_not_certain",),
    ),
    Fault(
        name="a-slow-rank-is-ended",
        about="The watchdog ends a job in which a rank is waited for at all, however short.",
        file="engine/watchdog/diagnosis.py",
        old="view.waiting.seconds > timeout]",
        new="view.waiting.seconds > 0]",
        tests=(f"{_DIAGNOSIS}::test_a_slow_rank_is_not_blamed",),
    ),
    Fault(
        name="a-silent-host-is-never-judged",
        about="Of a host that is gone its ranks are said to compute, and the host is not named.",
        file="engine/watchdog/diagnosis.py",
        old="late = [host for host in silent if host.seconds > timeout / 2]",
        new="late = [host for host in silent if host.seconds < 0]",
        tests=(f"{_DIAGNOSIS}::test_a_host_that_is_gone",),
    ),
    Fault(
        name="another-call-is-not-told",
        about="Of a rank that evaluates while others train it is said that it waits, not that it makes another call.",
        file="engine/watchdog/diagnosis.py",
        old="return _another_call(views) or _different",
        new="return _different",
        tests=(f"{_DIAGNOSIS}::test_who_makes_another_call_of_the_engine_is_named",),
    ),
    Fault(
        name="the-end-of-a-wait-is-not-noted",
        about="A rank that has got what it waited for seems to wait on, and a sound job is ended.",
        file="parallel/comm/flight/recorder.py",
        old="        layout.SEQUENCE.pack_into(self._map, layout.WAIT_AT, 0)\n",
        new="",
        tests=("tests/parallel/comm/flight/test_flight.py::test_a_step_is_read_as_it_was_written",),
    ),
    Fault(
        name="waiting-counts-as-computing",
        about="A rank that waits for a slow one is called slow itself.",
        file="engine/watchdog/stragglers.py",
        old="max(0.0, view.in_steps - sum(view.waits.values()))",
        new="view.in_steps",
        tests=("tests/engine/watchdog/test_stragglers.py::test_time_of_waiting_does_not_count",),
    ),
    Fault(
        name="moments-are-not-digested",
        about="A bit that flips in a moment is never found, since only weights and masters have digests.",
        file="engine/integrity/copies.py",
        old="return [*self._lasting, *self._inventory.moments()]",
        new="return list(self._lasting)",
        tests=(f"{_GUARD}::test_an_optimizer_of_the_users_own",),
    ),
    Fault(
        name="shards-are-not-digested",
        about="A bit that flips in a sharded weight is never found, since only what has copies is compared.",
        file="zero/state/state_inventory.py",
        old="            if flat.sharded:\n",
        new="            if flat.sharded:\n                continue\n",
        tests=("tests/engine/integrity/test_flips.py::test_every_flip_is_found_and_named",),
    ),
    Fault(
        name="digests-are-taken-before-the-update",
        about="Digests are of what the update has replaced, so no bit that flips after it is found.",
        file="engine/integrity/guard.py",
        old="        self._at_rest.compare()\n        return step.problem\n",
        new="        self._at_rest.take(self._update)\n        return step.problem\n",
        tests=(f"{_GUARD}::test_an_optimizer_of_the_users_own",),
    ),
    Fault(
        name="the-minority-of-copies-is-right",
        about="Of two copies that differ the second one is blamed, though nobody can tell which is right.",
        file="engine/integrity/copies.py",
        old="    if 2 * count <= len(values):\n",
        new="    if 2 * count < len(values):\n",
        tests=("tests/engine/integrity/test_copies.py::test_who_is_odd",),
    ),
    Fault(
        name="an-incomplete-copy-counts",
        about="A checkpoint in memory of which files are lost is loaded, and the newest whole one is not.",
        file="engine/checkpoint/memory_checkpoints.py",
        old="and held[key] >= offer.needed.keys()]",
        new="and held[key]]",
        tests=(f"{_MEMORY}::test_only_what_is_whole_and_of_one_save_is_chosen",),
    ),
    Fault(
        name="the-oldest-copy-is-loaded",
        about="Of several checkpoints in memory the oldest is loaded.",
        file="engine/checkpoint/memory_checkpoints.py",
        old="return max(whole, key=lambda offer: offer.step, default=None)",
        new="return min(whole, key=lambda offer: offer.step, default=None)",
        tests=(f"{_MEMORY}::test_only_what_is_whole_and_of_one_save_is_chosen",),
    ),
    Fault(
        name="copies-of-two-saves-are-mixed",
        about="Halves of two saves of one step are taken for one checkpoint.",
        file="engine/checkpoint/memory_checkpoints.py",
        old=(
            "        held.setdefault((offer.step, offer.attempt), set()).update(offer.held)\n"
            "        found.setdefault((offer.step, offer.attempt), offer)\n"
        ),
        new=(
            '        held.setdefault((offer.step, ""), set()).update(offer.held)\n'
            '        found.setdefault((offer.step, ""), offer)\n'
        ),
        tests=(f"{_MEMORY}::test_only_what_is_whole_and_of_one_save_is_chosen",),
    ),
    Fault(
        name="copies-of-another-run-are-found",
        about="A run in a folder that was made anew goes on from the copies of the run before it.",
        file="engine/checkpoint/memory_folder.py",
        old='return MemoryFolder(shared / f"trine-memory-{os.getuid()}-{place}-{token}")',
        new='return MemoryFolder(shared / f"trine-memory-{os.getuid()}-{place}-x")',
        tests=(f"{_MEMORY}::test_what_is_on_disk_and_newer_is_taken_and_another_run_is_not",),
    ),
    Fault(
        name="files-for-everybody",
        about="A host gives the files of a checkpoint to anybody who reaches its port.",
        file="engine/checkpoint/memory_folder.py",
        old='not hmac.compare_digest(str(asked["secret"]), self._secret) or ',
        new="",
        tests=(f"{_MEMORY}::test_a_server_answers_those_who_know_its_secret_about_what_it_offers",),
    ),
    Fault(
        name="other-sources-are-not-told",
        about="A job starts on hosts that have different sources of the engine.",
        file="launch/jobs/remote.py",
        old="    if facts.engine != other.engine:\n",
        new="    if facts.engine_folder != other.engine_folder:\n",
        tests=(
            f"{_PREFLIGHT}::test_a_difference_is_a_sentence",
            "tests/launch/jobs/test_ssh.py::test_all_that_differs_is_said_at_once_and_nothing_starts",
        ),
    ),
    Fault(
        name="another-gpu-is-not-told",
        about="A job starts on hosts that have other GPUs, as long as there are equally many.",
        file="launch/jobs/remote.py",
        old="    if sorted(facts.gpus) != sorted(other.gpus):\n",
        new="    if len(facts.gpus) != len(other.gpus):\n",
        tests=(f"{_PREFLIGHT}::test_a_difference_is_a_sentence",),
    ),
    Fault(
        name="a-taken-port-is-free",
        about="A port that another program has is taken for free, and the job never comes together.",
        file="launch/jobs/probe.py",
        old="        except OSError:\n            return 0\n        return int(listener",
        new="        except OSError:\n            return wish\n        return int(listener",
        tests=("tests/launch/jobs/test_ssh.py::test_free_ports_are_free",),
    ),
)
