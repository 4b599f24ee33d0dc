"""The runner's interface to a loaded model, and fused models made from transformers' modules."""
