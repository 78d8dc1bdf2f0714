"""A device with round figures, and its YAML."""

from __future__ import annotations

import pytest

from actmem.hardware import Hardware, parse_hardware

ROUND = """\
actmem_hardware: 1
name: round
matmul_flops_per_second: 100.0e12
memory_bytes_per_second: {peak: 1.0e12, reached: 0.9e12}
memory_bytes: 16GiB
allocation_bytes: 512
link:
  out_bytes_per_second: {peak: 20.0e9, reached: 10.0e9}
  in_bytes_per_second: 20.0e9
  duplex: 0.75
collectives: {scale_up_bytes_per_second: 100.0e9, scale_out_bytes_per_second: 10.0e9, node_size: 4}
op_seconds: 1.0e-6
efficiency:
  matmul: {low: 0.4, nominal: 0.5, high: 0.8}
  attention: {low: 0.2, nominal: 0.25, high: 0.5}
  memory: {low: 0.7, nominal: 0.8, high: 0.9}
  link: {low: 0.4, nominal: 0.8, high: 0.9}
"""


@pytest.fixture
def text() -> str:
    return ROUND


@pytest.fixture
def hardware() -> Hardware:
    return parse_hardware(ROUND)
