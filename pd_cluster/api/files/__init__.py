"""/v1/files and /v1/batches: their routes, and the execution of batches next to the public port's requests."""
