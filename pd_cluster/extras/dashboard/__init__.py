"""The dashboard: pages for a browser at the admin port."""
