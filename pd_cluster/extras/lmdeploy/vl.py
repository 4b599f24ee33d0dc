"""LMDeploy's module `vl` under its own name. Its function for images is defined in media/."""

from pd_cluster.media.load_image import load_image

__all__ = ["load_image"]
