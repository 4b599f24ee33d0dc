"""LoRA adapters attached to linear layers of a loaded model: never merged, computed only for rows that request them."""
