"""/v1/files and /v1/batches: their routes, and the execution of batches beside the requests of the public port."""
