"""Computation on Ascend NPUs: torch-npu's operators, which `device` registers with torch; no kernels of our own."""
