"""The runner's view of a loaded model, and the fused models made from transformers' modules."""
