"""LoRA adapters on linear layers of a loaded model: never merged, and computed only for rows that request them."""
