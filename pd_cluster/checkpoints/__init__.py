"""Model folders and the contents of their files."""
