"""Files that clients upload, and batches of requests that they hold: what is kept on the disk, and when it changes."""
