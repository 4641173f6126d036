"""The body of the command that tests/warm_python.py makes: ask for a process, be its stand-in until it ends.

It starts in ten milliseconds, so it imports little. It passes on its folder, environment, arguments and streams, then
every signal that can be caught; a process whose stand-in is killed is killed too, and both end alike.
"""

import json
import os
import signal
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ends with the status of the process that it stands for."""
    line = socket(AF_UNIX)
    line.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
    wish = json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda given, _: line.sendall(bytes([given])))
    streams = b"".join(stream.to_bytes(4, sys.byteorder) for stream in range(3))
    line.sendmsg([len(wish).to_bytes(4, "big")], [(SOL_SOCKET, SCM_RIGHTS, streams)])
    line.sendall(wish)
    answer = line.recv(16)
    if not answer:
        sys.exit("the server of warm processes has gone")
    code = int(answer)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
