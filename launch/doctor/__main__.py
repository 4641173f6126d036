"""Command ``torchrun -m engine.launch.doctor``: the doctor as a module, which a launcher starts on every rank."""

import os
import sys
from argparse import ArgumentParser

from engine.errors import EngineError
from engine.launch.doctor.doctor_command import add_doctor_options, run_doctor


def _start() -> None:
    parser = ArgumentParser(prog="engine.launch.doctor", description="Check that training would start on these hosts.")
    add_doctor_options(parser)
    try:
        run_doctor(parser.parse_args())
    except EngineError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once a host
            print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    _start()
