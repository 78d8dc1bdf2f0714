"""``python -m actmem``, which is how ``torchrun -m actmem`` starts it."""

import os
import sys

from actmem._compat import end_process
from actmem.cli.main import run


def _end(code: object) -> None:
    """Leave without the interpreter's last rites: a thread of torch.distributed that lets go of a Python object while
    they are said aborts the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    end_process(code if isinstance(code, int) else int(code is not None))


try:
    run()
except SystemExit as ended:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end(ended.code)
    raise
