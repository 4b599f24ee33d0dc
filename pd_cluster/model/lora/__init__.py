"""LoRA adapters beside the linear layers of a loaded model: never merged, computed for the rows that ask for them."""
