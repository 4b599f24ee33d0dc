"""FastDeploy's package `entrypoints`."""
