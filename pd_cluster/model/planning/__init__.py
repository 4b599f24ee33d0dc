"""Plans a runner before any weight is read: shares, the sizes of pools, and settings to refuse."""
