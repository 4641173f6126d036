"""``deepspeed.runtime.zero.utils``: the exception of ZeRO."""

from engine.errors import EngineError

ZeRORuntimeException = EngineError
