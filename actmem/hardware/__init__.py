"""What devices can do, and how long an op takes there. No torch in here."""

from actmem.hardware.claims import (
    dense_step_flops,
    flops_claim_problem,
    implied_flops_per_second,
    link_claim_problem,
)
from actmem.hardware.cost import CopyRates, CostModel, Work, work_of
from actmem.hardware.loading import device_names, load_hardware, parse_hardware, recognise_device
from actmem.hardware.profile import Collectives, Copying, Efficiency, Hardware, Level, Rate, Shares
from actmem.hardware.saving import save_hardware

__all__ = [
    "Collectives",
    "CopyRates",
    "Copying",
    "CostModel",
    "Efficiency",
    "Hardware",
    "Level",
    "Rate",
    "Shares",
    "Work",
    "dense_step_flops",
    "device_names",
    "flops_claim_problem",
    "implied_flops_per_second",
    "link_claim_problem",
    "load_hardware",
    "parse_hardware",
    "recognise_device",
    "save_hardware",
    "work_of",
]
