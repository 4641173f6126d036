"""Inputs of recomputed blocks on the host, where these inputs are shards of sequences."""

from typing import Any

import pytest

from engine.verify import verify
from tests.parallel.context.test_context_training import batches_of, config_of, llama
from tests.selection import wide


@pytest.mark.parametrize(
    ("parallel", "mode"),
    [
        ({"context": 2}, "full"),
        wide({"context": 2}, "selective"),
        wide({"tensor": 2, "sequence_parallel": True}, "full"),
        wide({"tensor": 2, "sequence_parallel": True}, "selective"),
    ],
    ids=str,
)
def test_shards_of_sequences_leave_for_the_host_and_come_back(parallel: dict[str, Any], mode: str) -> None:
    config = config_of({"data": 1, **parallel}, activation_checkpointing={"mode": mode, "inputs": "host"})
    result = verify(llama, config, batches_of("plain", 64), None, threads=2)
    assert result is not None and result.holds(), str(result)
