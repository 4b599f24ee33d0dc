"""LMDeploy's module `vl` under its own name: its function for images, defined in media/."""

from pd_cluster.media.load_image import load_image

__all__ = ["load_image"]
