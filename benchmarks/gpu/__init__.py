"""All GPU measurements in one hour."""
