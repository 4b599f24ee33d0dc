"""What Ascend NPUs compute with: torch-npu's operators, which `device` has made known to torch; none of our own."""
