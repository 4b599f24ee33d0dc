"""Computation on Ascend NPUs with torch-npu's operators, which `device` registers with torch. No kernels of our own."""
