"""GRPO of TRL with vLLM itself: on each grid its log-probabilities are the trainer's, up to rounding."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.huggingface.served_runs import Served, run_served, save_model
from tests.engine.huggingface.test_served_generation import GRIDS, check_served
from tests.engine.weights_out.vllm_process import vllm_server

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Folder of the model, and address of a vLLM server with it, which all runs share."""
    folder = tmp_path_factory.mktemp("vllm")
    save_model(folder)
    with vllm_server(folder, "--enable-scale-out", "--logprobs-mode", "processed_logprobs") as url:
        yield folder, url


@pytest.mark.parametrize("name", ["dp2 ZeRO 1", "tp2", "dp2 ZeRO 3"])
def test_vllm_samples_from_the_weights_of_each_step(name: str, server: tuple[Path, str]) -> None:
    (folder, url), (ranks, rows, config) = server, GRIDS[name]
    found = run_served(Served(folder=str(folder), url=url, config=config, rows=rows), ranks)
    print(name, {key: found[0][key] for key in ("versions", "mean", "max")})
    check_served(found)
