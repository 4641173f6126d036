"""Logs of step reports go on where an earlier start has ended."""

from pathlib import Path

from engine.reporting.sinks import CommaSeparated, JsonLines
from engine.reporting.step_report import StepReport

REPORT = StepReport(1, 2.5, 1.0, 1.0, 1e-3, 1, 1.0, None, None, 1, 1, False, None, 1.0)


def test_half_a_line_of_a_killed_start_does_not_take_the_next_one(tmp_path: Path) -> None:
    lines, table = tmp_path / "steps.jsonl", tmp_path / "steps.csv"
    for _ in range(2):
        for sink in (JsonLines(str(lines)), CommaSeparated(str(table), ())):
            sink.write(REPORT)
            sink.close()
        for path in (lines, table):
            path.write_bytes(path.read_bytes()[:-9])
    written = lines.read_text().splitlines()
    assert len(written) == 2 and all(line.startswith('{"step": 1, "loss": 2.5') for line in written)
    assert [line[:6] for line in table.read_text().splitlines()] == ["step,l", "1,2.5,", "1,2.5,"]
