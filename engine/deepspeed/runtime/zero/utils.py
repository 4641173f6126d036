"""``deepspeed.runtime.zero.utils``: the error of ZeRO."""

from engine.errors import EngineError

ZeRORuntimeException = EngineError
