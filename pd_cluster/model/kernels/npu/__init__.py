"""Computation on Ascend NPUs with torch-npu's operators, which `device` registers with torch; there are no kernels."""
