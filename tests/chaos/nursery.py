"""Makes processes in no time: imports what they need once, then forks one for each line of JSON on its standard input.

``nursery.py MODULE``. A child connects to the Unix socket that its line names, tells its number, and lives as
``MODULE.live(order, reader, say)``: orders and answers are lines of JSON. It ends with that connection, or with the
nursery, whatever state it is in.
"""

import asyncio
import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

LINE_BYTES = 8 << 20
PR_SET_PDEATHSIG = 1


async def grow_up(module: ModuleType, order: dict[str, object]) -> None:
    reader, writer = await asyncio.open_unix_connection(str(order["home"]), limit=LINE_BYTES)

    def say(**words: object) -> None:
        writer.write(json.dumps(words).encode() + b"\n")

    say(number=order["number"], pid=os.getpid())
    await module.live(order, reader, say)
    writer.close()
    await writer.wait_closed()


def main() -> None:
    # Beside this folder's, what all tests share.
    sys.path.append(str(Path(__file__).parents[1]))
    module = importlib.import_module(sys.argv[1])
    # Nobody waits for a child, so none stays behind as a zombie.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    print("ready", flush=True)
    os.dup2(2, 1)
    for line in sys.stdin:
        if os.fork():
            continue
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = 1
        try:
            asyncio.run(grow_up(module, json.loads(line)))
            status = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)


if __name__ == "__main__":
    main()
