"""What tests share: tiny checkpoints, the cluster harness, engines in one process."""
