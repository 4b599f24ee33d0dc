"""Plans a runner before any weight is read: shares, sizes of pools, and what is refused."""
