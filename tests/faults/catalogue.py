"""All seeded faults, by area."""

from tests.faults.adapted_experts import ADAPTED_EXPERTS
from tests.faults.adapters import ADAPTERS
from tests.faults.adapters_in_the_loop import ADAPTERS_IN_THE_LOOP
from tests.faults.answers_to_deepspeed import ANSWERS_TO_DEEPSPEED
from tests.faults.awaited_experts import AWAITED_EXPERTS
from tests.faults.caught_failures import CAUGHT_FAILURES
from tests.faults.checkpoint import CHECKPOINT
from tests.faults.communicating_kernels import COMMUNICATING_KERNELS
from tests.faults.compiled_ahead import COMPILED_AHEAD
from tests.faults.compiled_blocks import COMPILED_BLOCKS
from tests.faults.context import CONTEXT
from tests.faults.context_attention import CONTEXT_ATTENTION
from tests.faults.context_balance import CONTEXT_BALANCE
from tests.faults.context_bytes import CONTEXT_BYTES
from tests.faults.context_plan import CONTEXT_PLAN
from tests.faults.context_recurrence import CONTEXT_RECURRENCE
from tests.faults.context_rows import CONTEXT_ROWS
from tests.faults.counted_paths import COUNTED_PATHS
from tests.faults.cut_experts import CUT_EXPERTS
from tests.faults.data import DATA
from tests.faults.deepspeed_door import DEEPSPEED_DOOR
from tests.faults.ends_of_ranks import ENDS_OF_RANKS
from tests.faults.expert_load import EXPERT_LOAD
from tests.faults.expert_plans import EXPERT_PLANS
from tests.faults.experts import EXPERTS
from tests.faults.failing_disk import FAILING_DISK
from tests.faults.fault import Fault
from tests.faults.fewer_bits import FEWER_BITS
from tests.faults.first_gpu import FIRST_GPU
from tests.faults.generation import GENERATION
from tests.faults.grid_and_communication import GRID_AND_COMMUNICATION
from tests.faults.ground import GROUND
from tests.faults.grouped_experts import GROUPED_EXPERTS
from tests.faults.host_memory import HOST_MEMORY
from tests.faults.hosts import HOSTS
from tests.faults.job_ends import JOB_ENDS
from tests.faults.kernels_and_planning import KERNELS_AND_PLANNING
from tests.faults.keys_and_versions import KEYS_AND_VERSIONS
from tests.faults.loops_of_hosts import LOOPS_OF_HOSTS
from tests.faults.matrix_optimizers import MATRIX_OPTIMIZERS
from tests.faults.offload import OFFLOAD
from tests.faults.optimizers_and_schedules import OPTIMIZERS_AND_SCHEDULES
from tests.faults.outer_codecs import OUTER_CODECS
from tests.faults.outer_http import OUTER_HTTP
from tests.faults.outer_site import OUTER_SITE
from tests.faults.outer_store import OUTER_STORE
from tests.faults.pickled_weights import PICKLED_WEIGHTS
from tests.faults.pipeline import PIPELINE
from tests.faults.plain_torch import PLAIN_TORCH
from tests.faults.products_into_buckets import PRODUCTS_INTO_BUCKETS
from tests.faults.quantized_base import QUANTIZED_BASE
from tests.faults.recomputed_units import RECOMPUTED_UNITS
from tests.faults.reliability import RELIABILITY
from tests.faults.replica_copies import REPLICA_COPIES
from tests.faults.rounds_and_second_runs import ROUNDS_AND_SECOND_RUNS
from tests.faults.router_replay import ROUTER_REPLAY
from tests.faults.scripts_of_deepspeed import SCRIPTS_OF_DEEPSPEED
from tests.faults.secondary_shards import SECONDARY_SHARDS
from tests.faults.served_training import SERVED_TRAINING
from tests.faults.service import SERVICE
from tests.faults.shard_groups import SHARD_GROUPS
from tests.faults.shared_experts import SHARED_EXPERTS
from tests.faults.state_between_places import STATE_BETWEEN_PLACES
from tests.faults.state_forms import STATE_FORMS
from tests.faults.step_and_precision import STEP_AND_PRECISION
from tests.faults.sweep import SWEEP
from tests.faults.tenants import TENANTS
from tests.faults.tensor import TENSOR
from tests.faults.twice_differentiated import TWICE_DIFFERENTIATED
from tests.faults.uneven_calls import UNEVEN_CALLS
from tests.faults.uneven_work import UNEVEN_WORK
from tests.faults.weights_out import WEIGHTS_OUT
from tests.faults.wire import WIRE
from tests.faults.zero import ZERO

AREAS = {
    "grid and communication": GRID_AND_COMMUNICATION,
    "ground": GROUND,
    "tensor": (*TENSOR, *COMPILED_BLOCKS),
    "shared experts": (
        *EXPERTS,
        *SHARED_EXPERTS,
        *CUT_EXPERTS,
        *ADAPTED_EXPERTS,
        *EXPERT_PLANS,
        *ROUTER_REPLAY,
        *AWAITED_EXPERTS,
        *GROUPED_EXPERTS,
    ),
    "context": (
        *CONTEXT,
        *CONTEXT_ATTENTION,
        *CONTEXT_BALANCE,
        *CONTEXT_ROWS,
        *CONTEXT_PLAN,
        *CONTEXT_RECURRENCE,
        *CONTEXT_BYTES,
    ),
    "training service": (*SERVICE, *SERVED_TRAINING, *TENANTS, *GENERATION),
    "weights out": WEIGHTS_OUT,
    "outer loop": (*OUTER_CODECS, *OUTER_HTTP, *OUTER_SITE, *OUTER_STORE),
    "sweeps": SWEEP,
    "adapters": (*ADAPTERS, *ADAPTERS_IN_THE_LOOP),
    "pipeline": (*PIPELINE, *COUNTED_PATHS, *RECOMPUTED_UNITS),
    "zero": (*ZERO, *UNEVEN_CALLS, *UNEVEN_WORK, *TWICE_DIFFERENTIATED, *ROUNDS_AND_SECOND_RUNS),
    "matrix optimizers": MATRIX_OPTIMIZERS,
    "optimizers and schedules": OPTIMIZERS_AND_SCHEDULES,
    "state forms": STATE_FORMS,
    "offload": OFFLOAD,
    "state between places": STATE_BETWEEN_PLACES,
    "failing disk": FAILING_DISK,
    "products into buckets": PRODUCTS_INTO_BUCKETS,
    "fewer bits": FEWER_BITS,
    "activations in fewer bits": WIRE,
    "quantized base": QUANTIZED_BASE,
    "secondary shards": SECONDARY_SHARDS,
    "shard groups": SHARD_GROUPS,
    "replica copies": REPLICA_COPIES,
    "step and precision": STEP_AND_PRECISION,
    "plain torch": PLAIN_TORCH,
    "checkpoint": CHECKPOINT,
    "reliability": (*RELIABILITY, *JOB_ENDS, *ENDS_OF_RANKS),
    "host memory": HOST_MEMORY,
    "hosts": (*HOSTS, *LOOPS_OF_HOSTS, *KEYS_AND_VERSIONS),
    "kernels and planning": KERNELS_AND_PLANNING,
    "communicating kernels": COMMUNICATING_KERNELS,
    "data": DATA,
    "expert load": EXPERT_LOAD,
    "caught failures": (*CAUGHT_FAILURES, *PICKLED_WEIGHTS),
    "deepspeed door": (*DEEPSPEED_DOOR, *SCRIPTS_OF_DEEPSPEED, *ANSWERS_TO_DEEPSPEED),
    "first GPU": (*FIRST_GPU, *COMPILED_AHEAD),
}
FAULTS: tuple[Fault, ...] = tuple(fault for area in AREAS.values() for fault in area)
