"""``python -m actmem``, which is how ``torchrun -m actmem`` starts it."""

import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has begun yet that would have to be ended well

from actmem.cli.main import run  # noqa: E402


def _end(code: object) -> None:
    """Leave without the interpreter's last rites: a thread of torch.distributed that lets go of a Python object while
    they are said aborts the process."""
    from actmem._compat import end_process

    sys.stdout.flush()
    sys.stderr.flush()
    end_process(code if isinstance(code, int) else int(code is not None))


try:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
except SystemExit as ended:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end(ended.code)
    raise
