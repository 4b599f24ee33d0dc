"""Computation on Ascend NPUs: torch-npu's operators, which `device` registers with torch; there are no own kernels."""
