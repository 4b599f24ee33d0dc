"""The legs of requests on one worker: how they arrive and end, and what schedulers hear of them."""
