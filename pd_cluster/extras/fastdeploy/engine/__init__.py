"""FastDeploy's package `engine`."""
