"""One engine on several devices."""
