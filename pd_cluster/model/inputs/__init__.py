"""One step's input to the model, as arrays and tensors."""
