"""The legs of requests on one worker: how they arrive and end, and how schedulers learn of it."""
