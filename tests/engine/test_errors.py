"""What of another library's message goes into a sentence of the engine."""

import pytest

from engine.errors import first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.7]:5555",
            "Connection closed by peer [10.0.0.7]:5555",
        ),
        (
            "[/pytorch/third_party/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv\nframe #0: c10::Error",
            "Timed out waiting 5000ms for recv",
        ),
        ("[enforce fail at a.cc:1] . 2 vs 3", "[enforce fail at a.cc:1] . 2 vs 3"),
        ("[pair.cc:538]", "[pair.cc:538]"),
        ("", "RuntimeError"),
    ],
)
def test_the_first_line_without_the_place_in_its_source(message: str, line: str) -> None:
    assert first_line(RuntimeError(message)) == line
