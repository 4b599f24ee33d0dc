"""One engine for every role: steps, handover, links."""
