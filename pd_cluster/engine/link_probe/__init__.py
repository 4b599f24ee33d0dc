"""Both ends of a trial transfer of KV blocks, each in its own process, without a model."""
