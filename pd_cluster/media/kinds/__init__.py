"""The kinds of models that take pictures, each with its rules."""
