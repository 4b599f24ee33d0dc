"""FastDeploy's package of that name."""
