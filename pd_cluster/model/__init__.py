"""A checkpoint as a torch module that attends through the paged pool."""
