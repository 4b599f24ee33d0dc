"""FastDeploy's package `input`."""
