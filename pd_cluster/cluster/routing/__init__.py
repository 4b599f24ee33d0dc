"""Takes requests across the cluster: admission, legs at instances, outputs, retries."""
