"""Both ends of a trial transfer of KV blocks, each in a process of its own; no model."""
