"""``python -m actmem``, which is how ``torchrun -m actmem`` starts it."""

from actmem.cli.main import run

run()
