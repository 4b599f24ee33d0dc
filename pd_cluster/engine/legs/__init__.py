"""Begins and ends the legs of requests on one worker, and reports to schedulers."""
